"""The Laplace head of RIPT-VLA: a mean that is fitted by its absolute error, and a scale that is fitted around it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from serl_chunk.agents.losses import imitation_sum
from serl_chunk.agents.perception import Perception
from serl_chunk.agents.policies.base import Head, Record
from serl_chunk.agents.state import Committed, Context, Noise, Params
from serl_chunk.models.mlp import Mlp
from serl_chunk.models.sums import Sum

_FIRST_LOG_SCALE = -3.0  # log b of an output of 0 (RIPT-VLA's code)
_LOG_SCALE = (-6.0, 0.5)  # range of log b; RIPT-VLA's begins at -2, which is wider than chunks in our model space are


class LaplacePolicy(Head):
    """Independent Laplace distributions of a chunk's numbers. The network's parameters: {"mean", "scale"}.

    Imitation fits the mean by |a - mean|, and the scale by likelihood with mean and features held. In iterations on
    groups the scale stays as it is.
    """

    drawn = staticmethod(jax.random.laplace)

    def __init__(self, hidden: Sequence[int], perception: Perception) -> None:
        super().__init__(perception)
        self.mean: Any = Mlp(hidden, self.chunk_dim, "before")
        self.scale: Any = Mlp(hidden, self.chunk_dim, "before")

    def init_network(self, key: jax.Array, features: jax.Array) -> Params:
        keys = jax.random.split(key)
        return {
            "mean": self.mean.init(keys[0], features)["params"], "scale": self.scale.init(keys[1], features)["params"],
        }  # fmt: skip

    def _mean(self, params: Params, context: Context) -> jax.Array:
        return self.mean.apply({"params": params["mean"]}, context.features)

    def _log_scale(self, params: Params, context: Context) -> jax.Array:
        raw = self.scale.apply({"params": params["scale"]}, jax.lax.stop_gradient(context.features))
        return jnp.clip(raw + _FIRST_LOG_SCALE, *_LOG_SCALE)

    def loss(
        self, params: Params, context: Context, chunks: jax.Array, weight: jax.Array, given: jax.Array, draws: Noise
    ) -> Sum:
        """|a - mean| per number, plus -log p of the scale, under `weight` float32[B, H] or [B, H, A]."""
        error = jnp.abs(chunks.reshape(chunks.shape[0], -1) - self._mean(params, context))
        fit = -laplace_log_prob(jax.lax.stop_gradient(error), self._log_scale(params, context))
        return imitation_sum(self.chunks(error + fit), weight)

    def sample(self, params: Params, context: Context, noise: Noise, committed: Committed | None = None) -> jax.Array:
        """Chunks float32[..., N, H, A] before any clip; `noise` float32[..., N, H*A] is of scale 1."""
        mean, log_scale = (of(params, context)[..., None, :] for of in (self._mean, self._log_scale))
        return self.chunks(mean + jnp.exp(log_scale) * noise)

    def own_density(self, params: Params, context: Context) -> tuple[jax.Array, jax.Array]:
        """The gradient is the mean's alone."""
        return self._mean(params, context), jax.lax.stop_gradient(self._log_scale(params, context))

    def log_density(self, sample: jax.Array, mean: jax.Array, log_scale: jax.Array) -> jax.Array:
        return laplace_log_prob(sample - mean, log_scale)

    def recorded_chunk(self, record: Record) -> jax.Array:
        return self.chunks(record["sample"])


def laplace_log_prob(difference: jax.Array, log_scale: jax.Array) -> jax.Array:
    """The log-density of numbers that are `difference` from the mean."""
    return -jnp.abs(difference) / jnp.exp(log_scale) - log_scale - jnp.log(2.0)

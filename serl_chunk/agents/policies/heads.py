"""Policies that are a distribution of each number of a chunk: the Gaussian one, and the Laplace head of RIPT-VLA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from serl_chunk.agents.losses import imitation_sum
from serl_chunk.agents.perception import Perception
from serl_chunk.agents.policies.base import ChunkNetwork, ChunkPolicy, Record
from serl_chunk.agents.state import Committed, Context, Noise, Observation, Params
from serl_chunk.models.distributions import TanhNormal, normal_log_prob
from serl_chunk.models.mlp import Activation, KernelInit, Mlp, Norm
from serl_chunk.models.sums import Sum
from serl_chunk.types import ChunkBatch

_LOG_STD_MAX = 2.0  # of a Gaussian
_FIRST_LOG_SCALE = -3.0  # log b of an output of 0 (RIPT-VLA's code)
_LOG_SCALE = (-6.0, 0.5)  # range of log b; RIPT-VLA's begins at -2, which is wider than chunks in our model space are


class Head(ChunkNetwork, ChunkPolicy):
    """Base: a distribution of each number, with a mean and a scale. It learns from a batch without draws of its own.

    In iterations on groups `group.sigma` above 0 stands in place of the scale.
    """

    drawn: Callable[..., jax.Array] = staticmethod(jax.random.normal)  # its noise, of scale 1

    def own_density(self, params: Params, context: Context) -> tuple[jax.Array, jax.Array]:
        """Mean and log scale float32[..., H*A] of what iterations sample without `group.sigma`."""
        raise NotImplementedError

    def log_density(self, sample: jax.Array, mean: jax.Array, log_scale: jax.Array) -> jax.Array:
        """Of each number."""
        raise NotImplementedError

    def _density(self, params: Params, context: Context) -> tuple[jax.Array, jax.Array]:
        (mean, own), sigma = self.own_density(params, context), self.spec.group.sigma
        return mean, jnp.full_like(own, jnp.log(sigma)) if sigma else own

    def record(self, params: Params, context: Context, noise: Noise) -> Record:
        mean, log_scale = self._density(params, context)
        return {"sample": mean + jnp.exp(log_scale) * noise["z"]}

    def log_prob(self, params: Params, context: Context, record: Record) -> jax.Array:
        each = self.log_density(record["sample"], *self._density(params, context))
        of_actions = jnp.sum(self.chunks(each), axis=-1)
        return of_actions if self.spec.group.density == "tick" else jnp.sum(of_actions, axis=-1, keepdims=True)

    def draws(self, key: jax.Array, size: int) -> Noise:
        return {}

    def given(self, batch: ChunkBatch, draws: Noise) -> jax.Array:
        return jnp.zeros(batch.actions.shape[:2])

    def candidate_noise(
        self, key: jax.Array, observation: Observation, count: int, *, explore: bool, alone: jax.Array | bool = False
    ) -> jax.Array:
        """Not exploring, the first candidate is the mode and the others are always the same."""
        if explore:
            return self.drawn(key, (count, self.chunk_dim))
        return self.drawn(jax.random.key(0), (count, self.chunk_dim)).at[0].set(0.0)

    def record_noise(self, key: jax.Array) -> Noise:
        return {"z": self.drawn(key, self.noise_shape)}


class GaussianPolicy(Head):
    """TanhNormal over flat chunks; the net's outputs are means, then log sigmas."""

    def __init__(
        self, hidden: Sequence[int], perception: Perception, *, layer_norm: bool = True, log_std_min: float = -10.0,
        kernel_init: KernelInit = "lecun_normal", activation: Activation = "relu",
    ) -> None:  # fmt: skip
        super().__init__(perception)
        self.log_std_min = log_std_min
        # Published code has one layer for means and one for log sigmas, which matters for xavier's fan-out.
        blocks = 1 if kernel_init == "lecun_normal" else 2
        norm: Norm = "before" if layer_norm else "none"
        layers: dict[str, Any] = {"activation": activation, "kernel_init": kernel_init, "out_blocks": blocks}
        self.net: Any = Mlp(hidden, 2 * self.chunk_dim, norm, **layers)

    def init_network(self, key: jax.Array, features: jax.Array) -> Params:
        return self.net.init(key, features)["params"]

    def distribution(self, params: Params, context: Context) -> TanhNormal:
        mean, log_std = jnp.split(self.net.apply({"params": params}, context.features), 2, axis=-1)
        return TanhNormal(mean, jnp.clip(log_std, self.log_std_min, _LOG_STD_MAX))

    def loss(
        self, params: Params, context: Context, chunks: jax.Array, weight: jax.Array, given: jax.Array, draws: Noise
    ) -> Sum:
        """-log pi(a | o) per dimension under `weight` float32[B, H] or [B, H, A]."""
        return self.imitation(self.distribution(params, context), chunks, weight)

    def imitation(self, dist: TanhNormal, chunks: jax.Array, weight: jax.Array) -> Sum:
        return imitation_sum(-self.chunks(dist.log_prob(chunks.reshape(chunks.shape[0], -1))), weight)

    def sample(self, params: Params, context: Context, noise: Noise, committed: Committed | None = None) -> jax.Array:
        """Chunks float32[..., N, H, A] from noise float32[..., N, H*A]; nothing of them follows `committed`."""
        return self.sample_and_log_prob(params, context, noise)[0]

    def sample_and_log_prob(self, params: Params, context: Context, noise: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Chunks float32[..., N, H, A] from noise float32[..., N, H*A], and the log-probability of each number."""
        one = self.distribution(params, context)
        dist = TanhNormal(*(jnp.broadcast_to(x[..., None, :], noise.shape) for x in one))
        flat, log_prob = dist.sample_and_log_prob(noise)
        return self.chunks(flat), self.chunks(log_prob)

    def own_density(self, params: Params, context: Context) -> tuple[jax.Array, jax.Array]:
        """Before the tanh, which no ratio depends on."""
        return self.distribution(params, context)

    def log_density(self, sample: jax.Array, mean: jax.Array, log_scale: jax.Array) -> jax.Array:
        return normal_log_prob(sample, mean, jnp.exp(log_scale))

    def recorded_chunk(self, record: Record) -> jax.Array:
        return self.chunks(jnp.tanh(record["sample"]))


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

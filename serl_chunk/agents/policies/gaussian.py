"""The Gaussian policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from serl_chunk.agents.losses import imitation_sum
from serl_chunk.agents.perception import Perception
from serl_chunk.agents.policies.base import Head, Record
from serl_chunk.agents.state import Committed, Context, Noise, Params
from serl_chunk.models.distributions import TanhNormal, normal_log_prob
from serl_chunk.models.mlp import Activation, KernelInit, Mlp, Norm
from serl_chunk.models.sums import Sum

_LOG_STD_MAX = 2.0


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

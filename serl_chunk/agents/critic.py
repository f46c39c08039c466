"""The chunk critic that agents share: an ensemble of Q heads over an observation's features and, for some, V."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from serl_chunk.agents.losses import aggregate_heads, bootstrap_target, expectile_weight
from serl_chunk.agents.spec import AgentSpec
from serl_chunk.agents.state import Params, key_of
from serl_chunk.config.agents.base import ActorCriticConfig
from serl_chunk.models.ensemble import Ensemble
from serl_chunk.models.mlp import Mlp
from serl_chunk.models.sums import Sum, mean_of
from serl_chunk.models.value_heads import critic_values, initial_bias, regression_loss
from serl_chunk.types import ChunkBatch


class ChunkCritic:
    """Q_k(o, chunk) for k < K, and V(o) where `with_value`. Parameters: {"q"} and {"v"}, beside an "encoder".

    `layers` are other ones of `Mlp` than the configuration has.
    """

    heads: ClassVar[str] = "q"  # where in the critic's parameters the heads are

    def __init__(self, config: ActorCriticConfig, spec: AgentSpec, *, with_value: bool = False, **layers: Any) -> None:
        self.steps = spec.critic_steps  # actions that are scored
        self.config = c = config.critic
        self.spec, self.bounds = spec, spec.value_range
        own: dict[str, Any] = {
            "hidden": c.hidden, "out": 1, "norm": "before", "out_bias": initial_bias(self.bounds),
            "activation": c.activation, "kernel_init": config.kernel_init,
        }  # fmt: skip
        self.q = Ensemble(c.ensemble, **own | layers)
        self.v: Any = Mlp(**own | layers) if with_value else None

    def init(self, key: jax.Array, features: jax.Array) -> dict[str, Params]:
        params = {self.heads: self.init_heads(key_of(key, self.heads), features)}
        if self.v is not None:
            params["v"] = self.v.init(key_of(key, "v"), features)["params"]
        return params

    def init_heads(self, key: jax.Array, features: jax.Array) -> Params:
        chunk = self.truncate_flatten(jnp.zeros((*features.shape[:-1], self.steps, self.spec.action_dim), jnp.float32))
        return self.q.init(key, jnp.concatenate([features, chunk], axis=-1))

    def truncate_flatten(self, chunk: jax.Array) -> jax.Array:
        """The actions of chunks float32[..., L, A], L at least `steps`, that are scored: float32[..., steps * A]."""
        return chunk[..., : self.steps, :].reshape(*chunk.shape[:-2], -1)

    def outputs(self, q: Params, features: jax.Array, chunk: jax.Array) -> jax.Array:
        """Raw, float32[K, ...]. Features may have axes of size 1 for many flat chunks."""
        if features.shape[:-1] != chunk.shape[:-1]:
            return self.q.outputs(q, chunk, features)
        return self.q.outputs(q, jnp.concatenate([features, chunk], axis=-1))

    def expected_value(self, outputs: jax.Array) -> jax.Array:
        return critic_values(outputs, self.bounds)

    def expectile_loss(self, outputs: jax.Array, target: jax.Array, expectile: float, weight: jax.Array) -> Sum:
        """`regression_loss` whose fixed point is the expectile of the targets of equal inputs.

        Raw outputs float32[..., B], targets float32[..., B] without a gradient, rows' `weight` float32[B].
        0.5 is the targets' mean, 1 would be their maximum (IQL, Kostrikov 2022, equation 5).
        """
        target = jax.lax.stop_gradient(target)
        rows = expectile_weight(target, self.expected_value(outputs), expectile)
        return regression_loss(outputs, target, self.bounds, rows * jnp.broadcast_to(weight, rows.shape))

    def regression(
        self, params: Params, features: jax.Array, chunk: jax.Array, target: jax.Array, weight: jax.Array
    ) -> tuple[Sum, jax.Array]:
        """mean over k of l(Q_k(o, a), y) with y = `target` float32[B], and the heads' raw outputs as constants."""

        def loss(output: jax.Array, _: Any, constants: tuple[jax.Array, jax.Array]) -> Sum:
            return regression_loss(output, constants[0], self.bounds, constants[1])

        x = jnp.concatenate([features, chunk], axis=-1)
        return self.q.mean_loss(params[self.heads], x, loss, constants=(target, weight))

    def values(self, params: Params, features: jax.Array, chunk: jax.Array) -> jax.Array:
        return self.expected_value(self.outputs(params[self.heads], features, chunk))

    def mean_value(self, params: Params, features: jax.Array, chunk: jax.Array) -> jax.Array:
        """The mean over heads, float32[B] for batches; policies climb it. Its gradient is that of the chunks alone."""
        x = jnp.concatenate([features, chunk], axis=-1)
        return self.q.mean(params[self.heads], x, self.expected_value)

    def candidate_values(self, params: Params, features: jax.Array, chunks: jax.Array) -> jax.Array:
        """The values float32[..., N] that compare flat chunks float32[..., N, Hc*A] of one observation's features."""
        return aggregate_heads(self.values(params, features[..., None, :], chunks), self.config.target_aggregate)

    def value_output(self, params: Params, features: jax.Array) -> jax.Array:
        """Raw output of the value head float32[...]."""
        return self.v.apply({"params": params["v"]}, features)[..., 0]

    def head_noise(self, key: jax.Array) -> dict[str, jax.Array]:
        """ "heads" int32[subset], the random subset of target heads (REDQ); nothing where all count."""
        if self.config.target_subset == self.config.ensemble:
            return {}
        return {"heads": jax.random.choice(key, self.config.ensemble, (self.config.target_subset,), replace=False)}

    def target_values(
        self, target: Params, draws: Mapping[str, jax.Array], features: jax.Array, chunk: jax.Array
    ) -> jax.Array:
        """Aggregate of the drawn target heads, float32[...]; the others are not evaluated."""
        heads = target[self.heads]
        if "heads" in draws:
            heads = jax.tree.map(lambda p: p[draws["heads"]], heads)
        return aggregate_heads(self.values({self.heads: heads}, features, chunk), self.config.target_aggregate)

    def target(self, batch: ChunkBatch, next_value: jax.Array) -> jax.Array:
        return bootstrap_target(batch, self.spec.discount, next_value)

    def metrics(self, loss: Sum, outputs: jax.Array, target: jax.Array, batch: ChunkBatch) -> dict[str, Sum]:
        """HIL-SERL's critic metrics, and the ensemble's spread."""
        values = self.expected_value(outputs)
        return {
            "critic/critic_loss": loss,
            "critic/predicted_qs": mean_of(values),
            "critic/target_qs": mean_of(target),
            "critic/rewards": mean_of(jnp.sum(batch.rewards, -1)),
            "critic/head_std": mean_of(jnp.std(values, axis=0)),
        }

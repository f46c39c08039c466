"""The chunk critics that agents share: ensembles of Q heads over an observation's features and, for some, V."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from serl_chunk.agents.losses import aggregate_heads, bootstrap_target, expectile_weight
from serl_chunk.agents.spec import AgentSpec
from serl_chunk.agents.state import Alone, Noise, Params, key_of
from serl_chunk.config.agents.acfql import DecoupledConfig
from serl_chunk.config.agents.base import ActorCriticConfig
from serl_chunk.models.ensemble import Ensemble
from serl_chunk.models.mlp import Mlp
from serl_chunk.models.sums import Metrics, Sum, mean_of
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
        """Q_k, float32[K, ...]. Features may have axes of size 1 for many flat chunks."""
        apart = features.shape[:-1] != chunk.shape[:-1]
        inputs = (chunk, features) if apart else (jnp.concatenate([features, chunk], axis=-1),)
        return self.expected_value(self.q.outputs(params[self.heads], *inputs))

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

    def target_values(self, target: Params, draws: Noise, features: jax.Array, chunk: jax.Array) -> jax.Array:
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


class PrefixCritic(ChunkCritic):
    """The short critic of decoupled Q-chunking: the value of the first actions of a longer chunk.

    A critic of many actions propagates rewards quickly, but a policy of as many is hard to learn. So the long critic
    Q_h(o, a_0..a_{h-1}) only teaches, and chunks are compared by a critic of the e < h executed actions,

        Q_e(o, a_0..a_{e-1}) = the kappa-expectile, over the continuations in the data, of Q_h(o, a_0..a_{h-1}),

    which for kappa towards 1 is the value of the best continuation in the data (Li, Park and Levine 2025, "Decoupled
    Q-chunking", arXiv:2512.10926, the distilled critic). It has Q_k(o, a_0..a_{m-1}) for k < K and every m of
    `lengths`, the last of which is e = `spec.prefix_steps`.

    Parameters: the heads, {"prefix"}, next to the long critic's and of their number and size; its encoder is read and
    not trained. With several lengths the heads' inputs are e actions, 0 from the m-th on, and a mask of the first m.
    """

    heads: ClassVar[str] = "prefix"

    def __init__(self, config: DecoupledConfig, spec: AgentSpec) -> None:
        super().__init__(config, spec)
        self.steps = spec.prefix_steps
        count = config.prefix_lengths
        self.lengths = tuple(self.steps * (i + 1) // count for i in range(count))
        self.expectile = config.prefix_expectile
        self.replan_spread = config.replan_spread

    def truncate_flatten(self, chunk: jax.Array, length: int | None = None) -> jax.Array:
        """The heads' input of the first `length` actions, or e: float32[..., e * A (+ e with several lengths)]."""
        if len(self.lengths) == 1:
            return super().truncate_flatten(chunk)
        shown = (jnp.arange(self.steps) < (self.steps if length is None else length)).astype(jnp.float32)
        shown = jnp.broadcast_to(shown, (*chunk.shape[:-2], self.steps))
        flat = super().truncate_flatten(chunk[..., : self.steps, :] * shown[..., None])
        return jnp.concatenate([flat, shown], axis=-1)

    def distil(
        self, params: Params, features: jax.Array, actions: jax.Array, teacher: jax.Array, weight: jax.Array
    ) -> tuple[Sum, dict[str, Sum]]:
        """The prefix heads' loss and its metrics.

            L = mean over k, lengths m and windows of |kappa - 1(q_k < Q_m,k)| l(Q_m,k(o, a_0..a_{m-1}), q_k)

        with l the critic's loss and q_k = Q_h,k(o, a_0..a_{h-1}) of the online long critic, the constant `teacher`
        float32[K, B]. Head k learns from head k, so that the heads stay as different as their teachers. "prefix" alone
        gets a gradient. Features float32[B, F], actions float32[B, L, A], L at least e.
        """
        n = len(self.lengths)
        chunk = jnp.concatenate([self.truncate_flatten(actions, m) for m in self.lengths])
        features = jnp.tile(jax.lax.stop_gradient(features), (n, 1))

        def loss(output: jax.Array, teacher: jax.Array, weight: jax.Array) -> Sum:
            return self.expectile_loss(output, teacher, self.expectile, weight)

        x, teachers = jnp.concatenate([features, chunk], axis=-1), jnp.tile(teacher, (1, n))
        distilled, outputs = self.q.mean_loss(params[self.heads], x, loss, own=teachers, constants=jnp.tile(weight, n))
        values = self.expected_value(outputs)[:, -len(weight) :]  # of the e actions
        return distilled, {
            "critic/prefix_loss": distilled,
            "critic/prefix_values": mean_of(values),
            "critic/prefix_head_std": mean_of(jnp.std(values, axis=0)),
        }

    def plan(self, params: Params, features: jax.Array, chunk: jax.Array, alone: Alone = False) -> Metrics:
        """Decide how many actions of a chunk float32[H, A], chosen at features float32[F], to execute until replanning.

        The heads' disagreement behind the first length m_1 is

            s_m = std over k of [Q_m,k(o, a_0..a_{m-1}) - Q_m1,k(o, a_0..a_{m1-1})]

        in which their values of the state and of the first actions cancel. "steps" int32[] is the last of the lengths
        up to which no s_m exceeds `agent.replan_spread` (our own rule; no published one), or e where the critic
        has no say (`alone`). "spread" float32[N] is s_m of the N lengths. Both are for the decision's record; nothing
        where `agent.replan_spread` is none.
        """
        if self.replan_spread is None:
            return {}
        shown = jnp.stack([self.truncate_flatten(chunk, m) for m in self.lengths])
        features = jnp.tile(features[None], (len(shown), 1))
        values = self.values(params, features, shown)
        spread = jnp.std(values - values[:, :1], axis=0)
        near = jnp.logical_or(spread <= self.replan_spread, alone)
        agreed = jnp.cumprod(near.astype(jnp.int32))  # the first always: its spread is 0
        return {"steps": jnp.asarray(self.lengths, jnp.int32)[jnp.sum(agreed) - 1], "spread": spread}

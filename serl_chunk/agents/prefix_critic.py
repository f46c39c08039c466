"""The short critic of decoupled Q-chunking: the value of the first actions of a longer chunk.

A critic of many actions propagates rewards quickly, but a policy of as many is hard to learn. So the long critic
Q_h(o, a_0..a_{h-1}) only teaches, and chunks are compared by a critic of the e < h executed actions,

    Q_e(o, a_0..a_{e-1}) = the kappa-expectile, over the continuations in the data, of Q_h(o, a_0..a_{h-1}),

which for kappa towards 1 is the value of the best continuation in the data (Li, Park and Levine 2025, "Decoupled
Q-chunking", arXiv:2512.10926, the distilled critic).
"""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp

from serl_chunk.agents.critic import ChunkCritic
from serl_chunk.agents.spec import AgentSpec
from serl_chunk.agents.state import Alone, Params
from serl_chunk.config.agents.acfql import DecoupledConfig
from serl_chunk.models.sums import Metrics, Sum, mean_of


class PrefixCritic(ChunkCritic):
    """Q_k(o, a_0..a_{m-1}) for k < K and every m of `lengths`, the last of which is e = `spec.prefix_steps`.

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

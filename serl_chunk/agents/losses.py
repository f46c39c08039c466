"""Losses and targets that agents share. Each is a function of the parameters it trains and of nothing else.

Where a policy follows its critic, the gradient of values Q(o, a) is that of the actions alone.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from serl_chunk.config.agents.critic import Aggregate
from serl_chunk.models.sums import Loss, Sum, mean_of
from serl_chunk.types import STATE, ChunkBatch


def chunk_return(rewards: jax.Array, discount: float) -> jax.Array:
    """R = sum_i gamma^i r_i over a window's rewards float32[B, H]: float32[B] (Q-chunking, equation 6)."""
    powers = discount ** jnp.arange(rewards.shape[-1], dtype=jnp.float32)
    return jnp.sum(rewards * powers[None], axis=-1)  # no product of matrices, which a GPU would round to TF32


def bootstrap_target(batch: ChunkBatch, discount: float, next_value: jax.Array) -> jax.Array:
    """y = R + gamma^n * mask * V(o_{t+n}), without a gradient: float32[B]."""
    y = chunk_return(batch.rewards, discount) + batch.discount_n * batch.mask * next_value
    return jax.lax.stop_gradient(y)


def expectile_weight(target: jax.Array, value: jax.Array, expectile: float) -> jax.Array:
    """|tau - 1(q < v)|: the weight that makes a regression's fixed point the tau-expectile (IQL, Kostrikov 2022)."""
    return jnp.where(target < jax.lax.stop_gradient(value), 1.0 - expectile, expectile)


def aggregate_heads(values: jax.Array, how: Aggregate) -> jax.Array:
    """Minimum or mean over the leading ensemble axis."""
    return jnp.min(values, axis=0) if how == "min" else jnp.mean(values, axis=0)


def imitation_sum(error: jax.Array, bc: jax.Array) -> Sum:
    """`error` float32[B, H, A] under the sampler's imitation weights `bc` float32[B, H], or [B, H, A]."""
    bc = bc if bc.ndim == error.ndim else bc[..., None]
    return Sum(jnp.sum(error * bc), jnp.sum(bc) * (error.size // bc.size))


def imitated_numbers(bc: jax.Array, dims: jax.Array | None) -> jax.Array:
    """Weights of steps `bc` float32[B, H] as those of their numbers, with `ChunkBatch.bc_dims`; None: `bc` itself."""
    return bc if dims is None else bc[..., None] * dims


def of_human(batch: ChunkBatch, own_weight: float) -> jax.Array:
    """Whether a step, or a number of it, is a human's: bool[B, H, 1 or A]. It is imitated, by more than `own_weight`.

    Of a step that a human and the policy shared these are the human's numbers alone.
    """
    weight = imitated_numbers(batch.bc_weight, batch.bc_dims)
    return (weight if weight.ndim == batch.actions.ndim else weight[..., None]) > own_weight


def imitated(batch: ChunkBatch) -> ChunkBatch:
    """`batch` as an imitation loss sees it: with `bc_state_shift` and `bc_action_shift` added, where it has them."""
    if batch.bc_state_shift is None:
        return batch
    observations = {**batch.observations, STATE: batch.observations[STATE] + batch.bc_state_shift}
    actions = batch.actions + batch.bc_action_shift
    return batch._replace(observations=observations, actions=actions, bc_state_shift=None, bc_action_shift=None)


def soft_actor_loss(log_prob: jax.Array, log_alpha: jax.Array, q: Sum) -> Loss:
    """E[alpha log pi - Q] (SAC, Haarnoja 2018, equation 7), of log-probabilities float32[B] of the valued actions."""
    entropy, alpha = mean_of(-log_prob), jnp.exp(log_alpha)
    metrics = {"actor/entropy": entropy, "actor/temperature": mean_of(alpha), "actor/q": q}
    return Loss((entropy.times(-alpha), q.times(-1.0)), metrics)


def q_gradient_loss(values: jax.Array, imitation: Sum, bc_weight: float) -> Loss:
    """-mean max_i Q(o, a_i) + bc_weight imitation, of values float32[B, N] of samples a_i (ACRLPD on pi0).

    Adam's steps depend on the ratio of both weights alone.
    """
    q = mean_of(jnp.max(values, axis=-1))
    return Loss((q.times(-1.0), imitation.times(bc_weight)), {"actor/q": q, "actor/bc_loss": imitation})


def rlt_loss(q: Sum, chunks: jax.Array, reference: jax.Array, beta: float) -> Loss:
    """-Q + beta |a - a_ref|^2, of chunks float32[B, H, A] and of what they stay near (RL Token, Xu et al. 2026)."""
    distance = mean_of(jnp.sum(jnp.square(chunks - reference), axis=(-2, -1)))
    return Loss((q.times(-1.0), distance.times(beta)), {"actor/q": q, "actor/distance": distance})

"""Targets of critics, and the loss of values."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from serl_chunk.config.agents.critic import Aggregate
from serl_chunk.types import ChunkBatch


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

"""Losses and targets that agents share. Each is a function of the parameters it trains and of nothing else."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from serl_chunk.types import ChunkBatch


def chunk_return(rewards: jax.Array, discount: float) -> jax.Array:
    """R = sum_i gamma^i r_i over a window's rewards float32[B, H]: float32[B] (Q-chunking, equation 6)."""
    powers = discount ** jnp.arange(rewards.shape[-1], dtype=jnp.float32)
    return rewards @ powers


def bootstrap_target(batch: ChunkBatch, discount: float, next_value: jax.Array) -> jax.Array:
    """y = R + gamma^n * mask * V(o_{t+n}), without a gradient: float32[B]."""
    y = chunk_return(batch.rewards, discount) + batch.discount_n * batch.mask * next_value
    return jax.lax.stop_gradient(y)


def critic_values(outputs: jax.Array, loss: Literal["squared", "bounded"]) -> jax.Array:
    """Q from the critic's raw outputs: themselves, or their sigmoid."""
    return jax.nn.sigmoid(outputs) if loss == "bounded" else outputs


def regression_loss(
    outputs: jax.Array, target: jax.Array, loss: Literal["squared", "bounded"], weight: jax.Array | float = 1.0
) -> jax.Array:
    """Mean loss of raw outputs float32[..., B] against targets float32[B], each row times its `weight` float32[B].

    The divisor counts every row, whatever its weight.
    squared: (Q - y)^2. bounded: cross-entropy of sigmoid(output) against y in [0, 1], whose minimum is y as
    well, and whose gradient does not vanish at a confident mistake.
    """
    target = jnp.broadcast_to(target, outputs.shape)
    if loss == "squared":
        error = (outputs - target) ** 2
    else:
        target = jnp.clip(target, 0.0, 1.0)
        error = jax.nn.softplus(outputs) - target * outputs
    return jnp.mean(jnp.broadcast_to(weight, error.shape) * error)


def expectile_weight(target: jax.Array, value: jax.Array, expectile: float) -> jax.Array:
    """|tau - 1(q < v)|: the weight that makes a regression's fixed point the tau-expectile (IQL, Kostrikov 2022)."""
    return jnp.where(target < jax.lax.stop_gradient(value), 1.0 - expectile, expectile)


def imitation_mean(error: jax.Array, bc: jax.Array, divisor: Literal["weights", "batch"] = "weights") -> jax.Array:
    """Mean of `error` float32[B, H, A] under the sampler's imitation weights `bc` float32[B, H].

    weights: divides by the weights' sum, so that the share of imitated steps does not change the loss's size; a
    batch with nothing to imitate gives 0. batch: divides by the number of steps, whatever they weigh.
    """
    total = jnp.sum(bc) if divisor == "weights" else jnp.float32(bc.size)
    return jnp.sum(error * bc[..., None]) / jnp.maximum(total * error.shape[-1], 1.0)


def replace_tail(actions: jax.Array, valid: jax.Array, sampled: jax.Array) -> jax.Array:
    """Actions float32[B, H, A] with those after a termination (`valid` 0) taken from `sampled`."""
    return jnp.where(valid[..., None] > 0, actions, sampled)


def aggregate_heads(values: jax.Array, how: Literal["mean", "min"]) -> jax.Array:
    """Mean or minimum over the leading ensemble axis."""
    return jnp.mean(values, axis=0) if how == "mean" else jnp.min(values, axis=0)


def soft_update(online: object, target: object, tau: float | jax.Array) -> object:
    """target <- tau * online + (1 - tau) * target."""
    return jax.tree.map(lambda o, t: tau * o + (1 - tau) * t, online, target)

"""Imitation losses, and the batch as they see it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from serl_chunk.models.sums import Sum
from serl_chunk.types import STATE, ChunkBatch


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

"""Losses and targets that agents share. Each is a function of the parameters it trains and of nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from serl_chunk.agents.state import Loss, Metrics, Params
from serl_chunk.config.critics import Aggregate
from serl_chunk.models.sums import Sum
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


def imitation_sum(error: jax.Array, bc: jax.Array) -> Sum:
    """`error` float32[B, H, A] under the sampler's imitation weights `bc` float32[B, H], or [B, H, A]."""
    bc = bc if bc.ndim == error.ndim else bc[..., None]
    return Sum(jnp.sum(error * bc), jnp.sum(bc) * (error.size // bc.size))


def imitated_numbers(bc: jax.Array, dims: jax.Array | None) -> jax.Array:
    """Weights of steps `bc` float32[B, H] as those of their numbers, with `ChunkBatch.bc_dims`; None: `bc` itself."""
    return bc if dims is None else bc[..., None] * dims


def imitated(batch: ChunkBatch) -> ChunkBatch:
    """`batch` as an imitation loss sees it: with `bc_state_shift` and `bc_action_shift` added, where it has them."""
    if batch.bc_state_shift is None:
        return batch
    observations = {**batch.observations, STATE: batch.observations[STATE] + batch.bc_state_shift}
    return batch._replace(
        observations=observations, actions=batch.actions + batch.bc_action_shift,
        bc_state_shift=None, bc_action_shift=None,
    )  # fmt: skip


def aggregate_heads(values: jax.Array, how: Aggregate) -> jax.Array:
    """Minimum or mean over the leading ensemble axis."""
    return jnp.min(values, axis=0) if how == "min" else jnp.mean(values, axis=0)


def soft_update(online: object, target: object, tau: float | jax.Array) -> object:
    """target <- tau * online + (1 - tau) * target."""
    return jax.tree.map(lambda o, t: tau * o + (1 - tau) * t, online, target)


def descend(optimiser: optax.GradientTransformation, grads: Params, opt: Any, params: Params) -> tuple[Params, Any]:
    """The parameters after one step of `optimiser`, and its state."""
    updates, opt = optimiser.update(grads, opt, params)
    return optax.apply_updates(params, updates), opt


def gradient(
    loss: Callable[[Params, Any], Loss], params: Params, rows: Any, parts: int = 1
) -> tuple[Params, Metrics, jax.Array]:
    """The gradient of `loss(params, rows)`, its metrics and its value, of the whole batch or over `parts` equal ones.

    Every array of `rows` has the batch's axis first. The sums' weights must not depend on `params`; those of the whole
    batch are summed first, so that the parts' gradients add up to the whole one's.
    """

    def value(params: Params, rows: Any, weights: tuple[jax.Array, ...] | None) -> tuple[jax.Array, dict[str, Sum]]:
        terms, metrics = loss(params, rows)
        weights = tuple(jax.lax.stop_gradient(term.weight) for term in terms) if weights is None else weights
        means = [term._replace(weight=weight).mean() for term, weight in zip(terms, weights, strict=True)]
        return sum(means[1:], means[0]), metrics

    differentiated = jax.value_and_grad(value, has_aux=True)
    if parts == 1:
        (total, metrics), grads = differentiated(params, rows, None)
    else:
        cut = jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), rows)
        # The compiler drops the networks, which most weights do not depend on.
        each = jax.lax.scan(lambda _, part: (None, tuple(t.weight for t in loss(params, part).terms)), None, cut)[1]
        weights = jax.tree.map(lambda x: jnp.sum(x, axis=0), each)

        def step(sums: Any, part: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, sums, differentiated(params, part, weights)), None

        shapes = jax.eval_shape(differentiated, params, jax.tree.map(lambda x: x[0], cut), weights)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        ((total, metrics), grads), _ = jax.lax.scan(step, zeros, cut)
    return grads, {name: each.mean() for name, each in metrics.items()}, total

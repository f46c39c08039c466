"""Values of a critic head's raw outputs, one number a row, and their losses: squared, or bounded by known returns."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from serl_chunk.config.agents.critic import INITIAL_LOGIT
from serl_chunk.models.sums import Sum, mean_of

Range = tuple[float, float] | None
"""The least and the greatest return, which Q is a sigmoid between; None: Q is the output itself."""


def initial_bias(bounds: Range) -> float:
    """The last bias, with which a bounded fresh critic's value is about low + (high - low) * sigmoid(INITIAL_LOGIT)."""
    return 0.0 if bounds is None else INITIAL_LOGIT


def critic_values(outputs: jax.Array, bounds: Range) -> jax.Array:
    """Values of raw outputs, both float32[...]."""
    if bounds is None:
        return outputs
    low, high = bounds
    return low + (high - low) * jax.nn.sigmoid(outputs)


def regression_loss(outputs: jax.Array, target: jax.Array, bounds: Range, weight: jax.Array | float = 1.0) -> Sum:
    """Loss of raw outputs float32[..., B] against targets float32[B].

    Each row counts times its `weight` float32[B]; the divisor counts every row, whatever its weight. Without `bounds`
    (Q - y)^2; else the cross-entropy of sigmoid(output) against the target's place between them, clipped to [0, 1],
    whose gradient does not vanish at a confident mistake.
    """
    if bounds is None:
        error = (outputs - jnp.broadcast_to(target, outputs.shape)) ** 2
    else:
        low, high = bounds
        place = jnp.clip((jnp.broadcast_to(target, outputs.shape) - low) / (high - low), 0, 1)
        error = jax.nn.softplus(outputs) - place * outputs
    return mean_of(jnp.broadcast_to(weight, error.shape) * error)

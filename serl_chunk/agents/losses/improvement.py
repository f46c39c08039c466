"""Losses by which a policy follows its critic, of values Q(o, a) whose gradient is that of the actions alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from serl_chunk.agents.state import Loss
from serl_chunk.models.sums import Sum, mean_of


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

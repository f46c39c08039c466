"""The candidates of a decision: how many count, and which one is chosen."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from serl_chunk.config.agents import AgentConfig


def published_candidates(config: AgentConfig, *, pretrained: bool, climbs: bool = False) -> jax.Array:
    """How many candidates may be looked at when acting, int32 scalar: what `best_of` takes; 0 for all there are.

    Above 0 the critic is not trusted, so that nothing climbs it, and nobody plans anew on its advice: `climbs` says
    whether chunks would, and then (as where it gives advice) one candidate of one is published too.
    """
    few = config.pretrain_candidates
    limited = few < config.candidates or ((climbs or config.replan_spread is not None) and few == 1)
    return jnp.asarray(few if pretrained and limited else 0, jnp.int32)


def best_of(values: jax.Array, chunks: jax.Array, published: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The chunk of the highest value among N candidates, its value float32[], and its index int32[].

    N is the acting side's `agent.candidates`, which an evaluation may set to another number than the run had;
    `published_candidates` bounds it while the critic has seen no failure.
    """
    limit = jnp.where(published == 0, len(values), published)
    masked = jnp.where(jnp.arange(len(values)) < limit, values, -jnp.inf)
    best = jnp.argmax(masked)
    return chunks[best], values[best], best

"""Selection among candidate chunks: the best of N, of fewer while the critic is not trusted."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from serl_chunk.config.agents import AgentConfig


def is_trusted(config: AgentConfig, *, pretrained: bool) -> jax.Array:
    """Whether the critic decides, bool scalar; not while it is `pretrained`, which saw no failure.

    Unless `pretrain_candidates` lets it compare as many candidates then as later.
    """
    return jnp.asarray(not pretrained or 1 < config.candidates <= config.pretrain_candidates)


def best_of_n(values: jax.Array, trusted: jax.Array, few: int) -> jax.Array:
    """The index of the highest of `values` float32[N], of the first `few` where the critic is not `trusted`: int32."""
    compared = jnp.where(trusted, len(values), few)
    return jnp.argmax(jnp.where(jnp.arange(len(values)) < compared, values, -jnp.inf))

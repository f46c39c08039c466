"""What policies of chunks share."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from serl_chunk.agents.spec import AgentSpec
from serl_chunk.agents.state import Observation
from serl_chunk.types import STATE


class ChunkNetwork:
    """Base: a network of flat chunks float32[..., H*A]."""

    def __init__(self, spec: AgentSpec) -> None:
        self.spec, self.chunk_dim = spec, spec.horizon * spec.action_dim

    def chunks(self, flat: jax.Array) -> jax.Array:
        return flat.reshape(*flat.shape[:-1], self.spec.horizon, self.spec.action_dim)


def observation_key(observation: Observation) -> jax.Array:
    """A key made of the bits of one observation's state float32[S]: what does not explore draws by it."""
    bits = jax.lax.bitcast_convert_type(observation[STATE].astype(jnp.float32), jnp.uint32)
    weights = 2 * jnp.arange(bits.shape[0], dtype=jnp.uint32) + 1
    return jax.random.fold_in(jax.random.key(0), jnp.sum(bits * weights, dtype=jnp.uint32))

"""What policies of chunks have in common, and what agents ask of one."""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp

from serl_chunk.agents.compilation import Place
from serl_chunk.agents.perception import Perception
from serl_chunk.agents.state import Committed, Context, Noise, Observation, Params, key_of
from serl_chunk.agents.vision import ObservationEmbedder
from serl_chunk.models.sums import Sum
from serl_chunk.types import STATE, ChunkBatch

Record = dict[str, jax.Array]  # of a sampled decision: "sample", and what its density needs


class HasBase(Protocol):
    """What an agent's base belongs to."""

    source: str  # the file of weights that both sides read; empty: the base travels, or there is none
    source_setting: str  # which names it

    def base(self, key: jax.Array, place: Place) -> Params:
        """The base of `source`, else random numbers; empty where there is none. Raises ConfigError for the file."""

    def random(self, key: jax.Array) -> Params:
        """A base of random numbers, which has the shapes and dtypes of any."""


class ChunkPolicy(Protocol):
    """A policy with all that it reads an observation by.

    `policy` is its tree in an agent's state. Noise, and a record's arrays but for "step", end in the axes
    `noise_shape`, which hold a chunk and what the policy adds to one.
    """

    noise_shape: tuple[int, ...]
    # Where contexts are functions of the base and the observation alone: the axis of rows in each of their arrays.
    context_axes: Any
    with_base: HasBase

    def init(self, key: jax.Array) -> Params:
        """A fresh `policy`, without the weights of `pretrained`."""

    def pretrained(self, policy: Params, place: Place) -> Params:
        """`policy` with the weights of files, a run's start, each array by `place`. Raises ConfigError.

        `Vision.pretrained` has done so for image encoders.
        """
        return policy

    def network(self, policy: Params, base: Params) -> Params:
        """What the other methods have as `params`."""

    def context(self, policy: Params, base: Params, observation: Observation, critic: Params | None = None) -> Context:
        """What `params` read of an observation; by the encoder of `critic` where policies read that."""

    def described(self, context: Context, base: Params, observation: Observation) -> Observation:
        """An observation with what the policy adds to it for a critic, as `embedder` computes it of stored ones."""
        return observation

    def embedder(self, base: Params) -> ObservationEmbedder | None:
        """What computes the features of stored observations that critics read; None where there are none."""

    def augmented(self, key: jax.Array, base: Params, batch: ChunkBatch) -> ChunkBatch:
        """`batch` as an update reads it, its images changed at random."""

    def draws(self, key: jax.Array, size: int) -> Noise:
        """What `loss` draws for a batch of `size`."""

    def given(self, batch: ChunkBatch, draws: Noise) -> jax.Array:
        """float32[B, H]: 1 where an action was committed at the decision, and is not learnt."""

    def loss(
        self, params: Params, context: Context, chunks: jax.Array, weight: jax.Array, given: jax.Array, draws: Noise
    ) -> Sum:
        """Imitation of chunks float32[B, H, A] under `weight` float32[B, H] or [B, H, A]."""

    def sample(self, params: Params, context: Context, noise: Noise, committed: Committed | None = None) -> jax.Array:
        """Chunks float32[..., N, H, A] before any clip, from noise [..., N, *noise_shape]."""

    def candidate_noise(
        self, key: jax.Array, observation: Observation, count: int, *, explore: bool, alone: jax.Array | bool = False
    ) -> jax.Array:
        """Noise of `sample` for N candidates of one observation; not exploring, the first one's is the mode's."""

    def record_noise(self, key: jax.Array) -> Noise:
        """What `record` draws for one observation."""

    def record(self, params: Params, context: Context, noise: Noise) -> Record:
        """A decision as `group.density` samples it."""

    def recorded_chunk(self, record: Record) -> jax.Array:
        """The chunk float32[..., H, A] of a record, before any clip."""

    def log_prob(self, params: Params, context: Context, record: Record) -> jax.Array:
        """float32[..., R]: of each action (R = H), or of the whole decision (R = 1)."""


class ChunkNetwork:
    """Base: a network of flat chunks float32[..., H*A] behind an encoder. Its tree: {"encoder", `name`}."""

    name = "net"
    context_axes: Any = None

    def __init__(self, perception: Perception) -> None:
        self.perception, self.spec = perception, perception.spec
        self.chunk_dim = self.spec.horizon * self.spec.action_dim
        self.noise_shape: tuple[int, ...] = (self.chunk_dim,)
        self.with_base: HasBase = perception.vision

    def init_network(self, key: jax.Array, features: jax.Array) -> Params:
        """Fresh parameters behind features float32[B, F]."""
        raise NotImplementedError

    def init(self, key: jax.Array) -> Params:
        """A fresh tree; without "encoder" where the policy reads the critic's."""
        encoder, features = self.perception.init_encoder(key_of(key, "encoder"))
        own = {} if self.perception.shares_encoder else {"encoder": encoder}
        return own | {self.name: self.init_network(key_of(key, self.name), features)}

    def network(self, policy: Params, base: Params) -> Params:
        return policy[self.name]

    def context(self, policy: Params, base: Params, observation: Observation, critic: Params | None = None) -> Context:
        return self.perception.policy_context(policy, critic or {}, base, observation)

    def embedder(self, base: Params) -> ObservationEmbedder | None:
        return self.perception.embedder(base)

    def augmented(self, key: jax.Array, base: Params, batch: ChunkBatch) -> ChunkBatch:
        return self.perception.shifted(key, base, batch)

    def chunks(self, flat: jax.Array) -> jax.Array:
        return flat.reshape(*flat.shape[:-1], self.spec.horizon, self.spec.action_dim)


def observation_key(observation: Observation) -> jax.Array:
    """A key made of the bits of one observation's state float32[S]: what does not explore draws by it."""
    bits = jax.lax.bitcast_convert_type(observation[STATE].astype(jnp.float32), jnp.uint32)
    weights = 2 * jnp.arange(bits.shape[0], dtype=jnp.uint32) + 1
    return jax.random.fold_in(jax.random.key(0), jnp.sum(bits * weights, dtype=jnp.uint32))

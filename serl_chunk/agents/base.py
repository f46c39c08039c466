"""What every agent is: pure functions over one state, compiled once per shape.

An agent supplies its losses, of which `UpdateFns` makes the three compiled updates the learner calls; this module adds
what acts, and the parameter trees that travel.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from serl_chunk.agents.exploration import chunk_noise
from serl_chunk.agents.losses import replace_tail
from serl_chunk.agents.spec import GRIPPER, AgentSpec
from serl_chunk.agents.state import (
    AgentState,
    Metrics,
    Noise,
    Params,
    Prefix,
    flatten_params,
    param_shapes,
    unflatten_params,
)
from serl_chunk.agents.updates import UpdateFns
from serl_chunk.agents.vision import FrameEmbedder
from serl_chunk.config.agents import AgentConfig
from serl_chunk.types import IMAGE_PREFIX, STATE, ChunkBatch

_BACKBONE = 3  # folded into a key that updates split and fold 0 to 2 into


class Agent(UpdateFns):
    """Base of the agents: their updates, and acting with what travels of their state."""

    supports_prefix = True  # whether `sample` takes the committed actions of a delayed decision
    has_critic = True
    imitates_critic = False  # whether what the policy imitates was made better by the critic, and is no better than it

    def __init__(self, config: AgentConfig, spec: AgentSpec) -> None:
        super().__init__(config, spec)
        self.chunk_dim = spec.horizon * spec.action_dim
        self._sample = jax.jit(self._sample_chunk, static_argnames="explore")

    # -- what an agent supplies ------------------------------------------------------------------------------

    @abc.abstractmethod
    def init(self, rng: jax.Array) -> AgentState:
        """A fresh state from a typed key; pretrained weights come by `pretrained`."""

    @abc.abstractmethod
    def acting_noise(self, key: jax.Array, observation: Mapping[str, jax.Array], *, explore: bool) -> Noise:
        """What the candidates of one decision start from, float32[N, H*A]; the key counts only where `explore`."""

    @abc.abstractmethod
    def act(
        self, params: Params, observation: Mapping[str, jax.Array], noise: Noise, prefix: Prefix
    ) -> tuple[jax.Array, Metrics]:
        """A chunk float32[H, A] in model space for one observation and `acting_noise`, and the decision's record."""

    @abc.abstractmethod
    def policy_params(self, state: AgentState, *, pretrained: bool = False) -> Params:
        """The tree that `sample` needs, nothing else; `pretrained`: as long as the critic has seen no failure.

        `shared_params` is a part of it.
        """

    # -- what callers use ------------------------------------------------------------------------------------

    def pretrained(self, state: AgentState) -> AgentState:
        """A fresh state with the weights of `encoder.weights` in every backbone; raises ConfigError.

        Only what begins a run needs the file: a resume has them in its checkpoint, an actor in its first snapshot.
        """
        return self.vision.pretrained(state)

    def sample(
        self,
        params: Params,
        observation: Mapping[str, jax.Array],
        key: jax.Array,
        *,
        explore: bool,
        prefix: Prefix | None = None,
    ) -> tuple[jax.Array, Metrics]:
        """A chunk float32[H, A] in model space for one normalised observation (no batch axis).

        `prefix` may be longer than a chunk, as a normaliser for a critic of more actions makes it; the rest is ignored.
        """
        h = self.spec.horizon
        if prefix is None:
            prefix = (np.zeros((h, self.spec.action_dim), np.float32), np.zeros(h, np.float32))
        elif len(prefix[1]) > h:
            prefix = (prefix[0][:h], prefix[1][:h])
        return self._sample(params, dict(observation), key, prefix, explore=explore)

    def flatten_params(self, params: Params) -> dict[str, np.ndarray]:
        """`path -> array` on the host: what a snapshot carries."""
        return flatten_params(params)

    def load_params(self, flat: Mapping[str, np.ndarray]) -> Params:
        """The inverse of `flatten_params`, copied to the device.

        Raises ConfigError naming the first path that is missing, unknown, or of another shape or dtype.
        """
        return unflatten_params(flat, self._abstract_params)

    @functools.cached_property
    def _abstract_params(self) -> Params:
        """Shapes of the travelling parameters; cached, because tracing them at every swap would delay a robot."""
        return jax.eval_shape(lambda: self.policy_params(self.init(jax.random.key(0))))

    def network_shape(self) -> str:
        """The travelling parameters' paths and shapes as one text, for the handshake."""
        return param_shapes(self._abstract_params)

    def example_observation(self, batch: int | None = None) -> dict[str, jax.Array]:
        """Zeros of an observation's shapes, with a batch axis or without."""
        lead = () if batch is None else (batch,)
        out: dict[str, jax.Array] = {STATE: jnp.zeros((*lead, self.spec.state_dim), jnp.float32)}
        for c in self.spec.cameras:
            out[IMAGE_PREFIX + c.name] = jnp.zeros((*lead, c.height, c.width, 3), jnp.uint8)
        if self.spec.gripper_inputs:
            out[GRIPPER] = jnp.zeros((*lead, self.spec.gripper_inputs), jnp.float32)
        return out

    def seen_example(self, batch: int) -> dict[str, jax.Array]:
        """`example_observation` as the networks see it: with a frozen backbone's features in place of images."""
        out = self.example_observation(batch)
        return self.vision.encode_images(self.vision.zeros(), out) if self.vision.frozen else out

    def fresh_state(
        self, key: jax.Array, policy: Params, critic: Params | None = None, *, averaged: tuple[str, ...] = ()
    ) -> AgentState:
        """A state of these networks, which have not been updated yet; `key` becomes its `rng`.

        `averaged` names the parts of the critic that the target holds.
        """
        critic = critic or {}
        return AgentState(
            rng=key,
            frozen=self.vision.init(jax.random.fold_in(key, _BACKBONE)) if self.vision.frozen else {},
            critic_updates=jnp.zeros((), jnp.int32),
            policy_updates=jnp.zeros((), jnp.int32),
            policy=policy,
            policy_average=jax.tree.map(jnp.copy, policy),
            policy_opt=self.optimiser.init(policy),
            critic=critic,
            critic_opt=self.optimiser.init(critic) if critic else {},
            target={k: jax.tree.map(jnp.copy, critic[k]) for k in averaged},
            temperature={},
            temperature_opt={},
        )

    def shared_params(self, state: AgentState) -> Params:
        """What `policy_params` holds for all networks together: {"frozen"} where a backbone is frozen."""
        return {"frozen": state.frozen} if self.vision.frozen else {}

    def frame_embedder(self, state: AgentState) -> FrameEmbedder | None:
        """What computes the features that `encoder.cache_features` keeps of stored frames; none where it is off.

        Batches then carry `features/<camera>` in place of `images/<camera>`; actors and evaluations go on with pixels.
        """
        return FrameEmbedder(self.vision, state.frozen) if self._caches_features else None

    def cached_shapes(self) -> list[tuple[int, int, int]]:
        """(h, w, C) of one frame's features of each camera where they will be kept, else none; needs no state."""
        return [self.vision.feature_shape(c) for c in self.spec.cameras] if self._caches_features else []

    @property
    def _caches_features(self) -> bool:
        return self.config.encoder.cache_features and self.vision.frozen

    def acting_policy(self, state: AgentState) -> Params:
        """The policy that acts: the average, or the newest where `policy_ema` is 0."""
        return state.policy_average if self.config.policy_ema else state.policy

    def _sample_chunk(
        self, params: Params, observation: Mapping[str, jax.Array], key: jax.Array, prefix: Prefix, *, explore: bool
    ) -> tuple[jax.Array, Metrics]:
        observation = self.vision.encode_images(params.get("frozen", {}), observation)
        if self.config.encoder.trained_by == "critic":
            encoder = params["critic"].get("encoder", {})  # an empty one does not travel
            params = {**params, "policy": self.with_encoder(params["policy"], encoder)}
        return self.act(params, observation, self.acting_noise(key, observation, explore=explore), prefix)

    def critic_actions(self, batch: ChunkBatch, sampled_tail: jax.Array | None) -> jax.Array:
        """The batch's actions float32[B, L, A], those after a termination taken from `sampled_tail` where given."""
        return batch.actions if sampled_tail is None else replace_tail(batch.actions, batch.valid, sampled_tail)

    def exploration_noise(self, key: jax.Array, count: int) -> jax.Array:
        """Standard normal noise of `count` chunks, float32[count, H*A], smooth where `exploration_knots` say so."""
        knots = self.config.exploration_knots
        return chunk_noise(key, count, self.spec.horizon, self.spec.action_dim, knots)

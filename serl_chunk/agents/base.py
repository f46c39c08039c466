"""Base of the agents: pure functions over one state, compiled once per shape.

`UpdateFns` compiles an agent's losses into the updates that the learner calls. This module adds acting, and the
parameter trees that travel to actors.
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
    Observation,
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
    """Base of the agents: updates, and acting with the travelling part of the state."""

    supports_prefix = True  # whether `sample` takes the committed actions of a delayed decision
    has_critic = True
    imitates_critic = False  # whether the policy imitates chunks that the critic improved

    def __init__(self, config: AgentConfig, spec: AgentSpec) -> None:
        super().__init__(config, spec)
        self.chunk_dim = spec.horizon * spec.action_dim
        self._sample = jax.jit(self._sample_chunk, static_argnames="explore")

    @abc.abstractmethod
    def init(self, rng: jax.Array) -> AgentState:
        """A fresh state from a typed key, without the weights of `pretrained`."""

    @abc.abstractmethod
    def acting_noise(self, key: jax.Array, observation: Observation, *, explore: bool) -> Noise:
        """Starting noise float32[N, H*A] of one decision's candidates; `key` is used only where `explore`."""

    @abc.abstractmethod
    def act(self, params: Params, observation: Observation, noise: Noise, prefix: Prefix) -> tuple[jax.Array, Metrics]:
        """A chunk float32[H, A] in model space from one observation and `acting_noise`, and the decision's record."""

    @abc.abstractmethod
    def policy_params(self, state: AgentState, *, pretrained: bool = False) -> Params:
        """The parameters that `sample` needs, `shared_params` among them.

        Args:
            pretrained: the critic has seen no failure yet.
        """

    def pretrained(self, state: AgentState) -> AgentState:
        """A fresh state with the weights of `encoder.weights` in every backbone. Raises ConfigError.

        Only the start of a run needs the file: a checkpoint and a snapshot contain the weights.
        """
        return self.vision.pretrained(state)

    def sample(
        self, params: Params, observation: Observation, key: jax.Array, *, explore: bool, prefix: Prefix | None = None
    ) -> tuple[jax.Array, Metrics]:
        """A chunk float32[H, A] in model space for one normalised observation (no batch axis).

        Args:
            prefix: may be longer than a chunk (the normaliser of a critic of more actions); the rest is ignored.
        """
        h = self.spec.horizon
        if prefix is None:
            prefix = (np.zeros((h, self.spec.action_dim), np.float32), np.zeros(h, np.float32))
        elif len(prefix[1]) > h:
            prefix = (prefix[0][:h], prefix[1][:h])
        return self._sample(params, dict(observation), key, prefix, explore=explore)

    def flatten_params(self, params: Params) -> dict[str, np.ndarray]:
        return flatten_params(params)

    def load_params(self, flat: Mapping[str, np.ndarray]) -> Params:
        """The inverse of `flatten_params`, copied to the device.

        Raises ConfigError naming the first path that is missing, unknown, or of another shape or dtype.
        """
        return unflatten_params(flat, self._abstract_params)

    @functools.cached_property
    def _abstract_params(self) -> Params:
        """Shapes of the travelling parameters; cached, because tracing at every swap would delay a robot."""
        return jax.eval_shape(lambda: self.policy_params(self.init(jax.random.key(0))))

    def network_shape(self) -> str:
        """The travelling parameters' paths and shapes as one text, for the handshake."""
        return param_shapes(self._abstract_params)

    def example_observation(self, batch: int | None = None) -> dict[str, jax.Array]:
        lead = () if batch is None else (batch,)
        out: dict[str, jax.Array] = {STATE: jnp.zeros((*lead, self.spec.state_dim), jnp.float32)}
        for c in self.spec.cameras:
            out[IMAGE_PREFIX + c.name] = jnp.zeros((*lead, c.height, c.width, 3), jnp.uint8)
        if self.spec.gripper_inputs:
            out[GRIPPER] = jnp.zeros((*lead, self.spec.gripper_inputs), jnp.float32)
        return out

    def seen_example(self, batch: int) -> dict[str, jax.Array]:
        """`example_observation` with a frozen backbone's features in place of images."""
        out = self.example_observation(batch)
        return self.vision.encode_images(self.vision.zeros(), out) if self.vision.frozen else out

    def fresh_state(
        self, key: jax.Array, policy: Params, critic: Params | None = None, *, averaged: tuple[str, ...] = ()
    ) -> AgentState:
        """A state of fresh networks; `key` becomes its `rng`, `averaged` names the critic's parts in the target."""
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
        """The part of `policy_params` that all networks share: {"frozen"} where a backbone is frozen."""
        return {"frozen": state.frozen} if self.vision.frozen else {}

    def frame_embedder(self, state: AgentState) -> FrameEmbedder | None:
        """Computes features of stored frames for `encoder.cache_features`; None where it is off.

        Batches then have `features/<camera>` in place of `images/<camera>`; actors and evaluations use pixels.
        """
        return FrameEmbedder(self.vision, state.frozen) if self._caches_features else None

    def cached_shapes(self) -> list[tuple[int, int, int]]:
        """(h, w, C) of one frame's features of each camera where they are cached, else empty."""
        return [self.vision.feature_shape(c) for c in self.spec.cameras] if self._caches_features else []

    @property
    def _caches_features(self) -> bool:
        return self.config.encoder.cache_features and self.vision.frozen

    def acting_policy(self, state: AgentState) -> Params:
        """The policy that acts: the average, or the newest where `policy_ema` is 0."""
        return state.policy_average if self.config.policy_ema else state.policy

    def _sample_chunk(
        self, params: Params, observation: Observation, key: jax.Array, prefix: Prefix, *, explore: bool
    ) -> tuple[jax.Array, Metrics]:
        observation = self.vision.encode_images(params.get("frozen", {}), observation)
        if self.config.encoder.trained_by == "critic":
            encoder = params["critic"].get("encoder", {})  # an empty one does not travel
            params = {**params, "policy": self.with_encoder(params["policy"], encoder)}
        return self.act(params, observation, self.acting_noise(key, observation, explore=explore), prefix)

    def critic_actions(self, batch: ChunkBatch, sampled_tail: jax.Array | None) -> jax.Array:
        """The batch's actions float32[B, L, A]; those after a termination are from `sampled_tail` where given."""
        return batch.actions if sampled_tail is None else replace_tail(batch.actions, batch.valid, sampled_tail)

    def exploration_noise(self, key: jax.Array, count: int) -> jax.Array:
        """Standard normal noise of `count` chunks, float32[count, H*A], smooth where `exploration_knots` say so."""
        knots = self.config.exploration_knots
        return chunk_noise(key, count, self.spec.horizon, self.spec.action_dim, knots)

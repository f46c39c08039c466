"""An agent of the arm's dimensions, and values from elsewhere for the grippers': what both kinds of gripper share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from serl_chunk.agents.base import Agent
from serl_chunk.agents.registry import AgentSpec
from serl_chunk.agents.state import AgentState, Draws, Metrics, Noise, Params, Prefix
from serl_chunk.config.agents import AgentConfig
from serl_chunk.types import ChunkBatch

Build = Callable[[AgentSpec], Agent]


class ArmAndGripper(Agent):
    """The arm's agent learns and acts in its own dimensions; a subclass says what the grippers do."""

    def __init__(self, config: AgentConfig, spec: AgentSpec, build: Build, *, gripper_inputs: int = 0) -> None:
        super().__init__(config, spec)
        self.grippers = np.array(spec.grippers, np.int32)
        self.arm = np.setdiff1d(np.arange(spec.action_dim), self.grippers)
        self.inner = build(
            dataclasses.replace(spec, action_dim=len(self.arm), grippers=(), gripper_inputs=gripper_inputs)
        )
        self.policy_updates, self.has_critic = self.inner.policy_updates, self.inner.has_critic
        self.imitates = self.inner.imitates
        self.supports_prefix, self.imitates_critic = self.inner.supports_prefix, self.inner.imitates_critic
        self._order = np.argsort(np.concatenate([self.arm, self.grippers]))

    def arm_batch(self, state: AgentState, batch: ChunkBatch) -> ChunkBatch:
        """What the arm's agent learns from."""
        return batch._replace(actions=batch.actions[..., self.arm], before=None)

    def merged(self, arm: jax.Array, gripper: jax.Array, prefix: Prefix) -> jax.Array:
        """A chunk float32[H, A] of the arm's [H, A - G] and the grippers' [H, G]; what is committed is kept."""
        gripper = jnp.where(prefix[1][:, None] > 0, prefix[0][:, self.grippers], gripper)
        return jnp.concatenate([arm, gripper], axis=-1)[:, self._order]

    def arm_prefix(self, prefix: Prefix) -> Prefix:
        """Of what is committed, the arm's dimensions."""
        return prefix[0][:, self.arm], prefix[1]

    def init(self, rng: jax.Array) -> AgentState:
        return self.inner.init(rng)

    def critic_draws(self, key: jax.Array, batch: ChunkBatch) -> Draws:
        return self.inner.critic_draws(key, batch._replace(actions=batch.actions[..., self.arm]))

    def policy_draws(self, key: jax.Array, batch: ChunkBatch) -> Draws:
        return self.inner.policy_draws(key, batch._replace(actions=batch.actions[..., self.arm]))

    def critic_step(self, state: AgentState, batch: ChunkBatch, draws: Draws) -> tuple[AgentState, Metrics]:
        """The arm's."""
        return self.inner.critic_step(state, self.arm_batch(state, batch), draws)

    def policy_step(
        self, state: AgentState, batch: ChunkBatch, draws: Draws, *, imitate_only: bool
    ) -> tuple[AgentState, Metrics]:
        """The arm's."""
        return self.inner.policy_step(state, self.arm_batch(state, batch), draws, imitate_only=imitate_only)

    def joint_step(
        self, state: AgentState, batch: ChunkBatch, critic_draws: Draws, policy_draws: Draws
    ) -> tuple[AgentState, Metrics]:
        """The arm's."""
        return self.inner.joint_step(state, self.arm_batch(state, batch), critic_draws, policy_draws)

    def _critic_loss(
        self, critic: Params, state: AgentState, batch: ChunkBatch, draws: Draws
    ) -> tuple[jax.Array, Metrics]:
        return self.inner._critic_loss(critic, state, self.arm_batch(state, batch), draws)

    def _policy_loss(
        self, policy: Params, state: AgentState, batch: ChunkBatch, draws: Draws, *, imitate_only: bool
    ) -> tuple[jax.Array, Metrics]:
        return self.inner._policy_loss(policy, state, self.arm_batch(state, batch), draws, imitate_only=imitate_only)

    def acting_noise(self, key: jax.Array, observation: Mapping[str, jax.Array], *, explore: bool) -> Noise:
        return self.inner.acting_noise(key, observation, explore=explore)

    def policy_params(self, state: AgentState, *, pretrained: bool = False) -> Params:
        return self.inner.policy_params(state, pretrained=pretrained)

    def batches_used(self, updates: int) -> int:
        return self.inner.batches_used(updates)

    def with_encoder(self, policy: Params, encoder: Params) -> Params:
        return self.inner.with_encoder(policy, encoder)

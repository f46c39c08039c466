"""Behaviour cloning with the flow policy; fed demonstrations and interventions it is HG-DAgger (Kelly 2019)."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from serl_chunk.agents.base import Agent, AgentState, Metrics, Params, Prefix
from serl_chunk.agents.flow_policy import FlowPolicy, candidate_noise
from serl_chunk.agents.registry import AgentSpec
from serl_chunk.config.agents import BcConfig
from serl_chunk.types import ChunkBatch


class Bc(Agent):
    """No critic: the critic half of an update is empty."""

    config: BcConfig

    def __init__(self, config: BcConfig, spec: AgentSpec) -> None:
        super().__init__(config, spec)
        self.flow = FlowPolicy(config, config.flow, spec)

    def init(self, rng: jax.Array) -> AgentState:
        k_policy, k_state = jax.random.split(rng)
        policy = self.flow.init(k_policy, self.example_observation(1))
        return AgentState(
            rng=k_state,
            critic_updates=jnp.zeros((), jnp.int32),
            policy_updates=jnp.zeros((), jnp.int32),
            policy=policy,
            policy_average=jax.tree.map(jnp.copy, policy),
            policy_opt=self.optimiser.init(policy),
            critic={},
            critic_opt={},
            target={},
            temperature={},
            temperature_opt={},
        )

    def _critic_step(self, state: AgentState, batch: ChunkBatch) -> tuple[AgentState, Metrics]:
        return state.replace(critic_updates=state.critic_updates + 1), {}

    def _critic_loss(
        self, critic: Params, state: AgentState, batch: ChunkBatch, key: jax.Array
    ) -> tuple[jax.Array, Metrics]:
        raise NotImplementedError("bc has no critic")

    def _policy_step(self, state: AgentState, batch: ChunkBatch, *, imitate_only: bool) -> tuple[AgentState, Metrics]:
        updates = 1 if imitate_only else self.config.policy_updates
        state, loss = self._policy_gradient_steps(self.flow.loss, state, batch, updates)
        return state, {"actor/bc_loss": loss, "actor/bc_share": jnp.mean(batch.bc)}

    def _sample_chunk(
        self, params: Params, observation: Mapping[str, jax.Array], key: jax.Array, prefix: Prefix, *, explore: bool
    ) -> tuple[jax.Array, Metrics]:
        noise = candidate_noise(key, observation, 1, self.chunk_dim, low=self.config.flow.noise_low, explore=explore)
        return self.flow.sample(params["policy"], observation, noise, prefix)[0], {}

    def policy_params(self, state: AgentState, *, pretrained: bool = False) -> Params:
        return {"policy": state.policy_average}

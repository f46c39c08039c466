"""Behaviour cloning, by flow matching or with a Gaussian.

Fed demonstrations and interventions it is HG-DAgger (Kelly 2019).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from serl_chunk.agents.base import Agent
from serl_chunk.agents.flow_policy import FlowPolicy, with_prefix
from serl_chunk.agents.gaussian_policy import GaussianPolicy
from serl_chunk.agents.spec import AgentSpec
from serl_chunk.agents.state import (
    AgentState,
    LossAndMetrics,
    LossNoise,
    Metrics,
    Observation,
    Params,
    Prefix,
    StateAndMetrics,
)
from serl_chunk.config.agents import BcConfig
from serl_chunk.types import ChunkBatch


class Bc(Agent):
    """An agent without a critic: that half of an update is empty, and no batch is drawn for it."""

    config: BcConfig
    has_critic = False

    def __init__(self, config: BcConfig, spec: AgentSpec) -> None:
        super().__init__(config, spec)
        self.policy_updates = config.policy_updates
        self.flow = FlowPolicy(config, config.flow, spec) if config.policy == "flow" else None
        self.gaussian = GaussianPolicy(config, spec, config.hidden) if config.policy == "gaussian" else None

    def init(self, rng: jax.Array) -> AgentState:
        k_policy, k_state = jax.random.split(rng)
        observation = self.seen_example(1)
        if self.flow is not None:
            policy = self.flow.init(k_policy, observation)
        else:
            assert self.gaussian is not None
            k_encoder, k_net = jax.random.split(k_policy)
            policy = self.gaussian.init(k_encoder, k_net, observation)
        return self.fresh_state(k_state, policy)

    def batches_used(self, updates: int) -> int:
        """One batch for the policy, or one for each critic step (`update_order=joint`)."""
        return updates if self.config.update_order == "joint" else 1

    def critic_draws(self, key: jax.Array, batch: ChunkBatch) -> LossNoise:
        return {}

    def policy_draws(self, key: jax.Array, batch: ChunkBatch) -> LossNoise:
        return {} if self.flow is None else self.flow.draws(key, batch)

    def _critic_gradient(self, state: AgentState, batch: ChunkBatch, draws: LossNoise) -> tuple[Params, Metrics]:
        return {}, {}

    def _apply_critic_gradient(self, state: AgentState, grads: Params) -> AgentState:
        return state.replace(critic_updates=state.critic_updates + 1)

    def _critic_step(self, state: AgentState, batch: ChunkBatch) -> StateAndMetrics:
        return self.critic_step(state, batch, {})

    def _policy_loss(
        self, policy: Params, state: AgentState, batch: ChunkBatch, draws: LossNoise, *, imitate_only: bool
    ) -> LossAndMetrics:
        """Flow matching, or -log pi per dimension, over the steps that `bc` marks."""
        if self.flow is not None:
            loss = self.flow.loss(policy, batch, draws)
        else:
            assert self.gaussian is not None
            dist = self.gaussian.distribution(policy, batch.observations)
            loss = self.gaussian.imitation(dist, batch, batch.bc_weight)
        return loss, {"actor/bc_loss": loss, "actor/bc_share": jnp.mean(batch.bc_weight)}

    def acting_noise(self, key: jax.Array, observation: Observation, *, explore: bool) -> jax.Array:
        if self.flow is None:  # without noise, the Gaussian's mode
            return self.exploration_noise(key, 1) if explore else jnp.zeros((1, self.chunk_dim))
        return self.flow.candidate_noise(key, observation, 1, explore=explore)

    def act(
        self, params: Params, observation: Observation, noise: jax.Array, prefix: Prefix
    ) -> tuple[jax.Array, Metrics]:
        if self.flow is not None:
            return self.flow.sample(params["policy"], observation, noise, prefix)[0], {}
        assert self.gaussian is not None
        dist = self.gaussian.distribution(params["policy"], observation)
        flat, _ = dist.sample_and_log_prob(noise[0])
        return with_prefix(self.gaussian.chunks(flat)[None], prefix)[0], {}

    def policy_params(self, state: AgentState, *, pretrained: bool = False) -> Params:
        return {"policy": self.acting_policy(state)} | self.shared_params(state)

"""Behaviour cloning, by flow matching or with a Gaussian; with interventions it is HG-DAgger (Kelly 2019)."""

from __future__ import annotations

import jax

from serl_chunk.agents.base import Agent
from serl_chunk.agents.losses import imitated, imitated_numbers
from serl_chunk.agents.policies import FlowPolicy, GaussianPolicy
from serl_chunk.agents.spec import AgentSpec
from serl_chunk.agents.state import AgentState, Committed, Loss, Metrics, Noise, Observation, Params, key_of
from serl_chunk.config.agents import BcConfig
from serl_chunk.models.sums import mean_of
from serl_chunk.types import ChunkBatch


class Bc(Agent):
    """An agent without a critic: an update is the policy's alone, and no batch is drawn for another."""

    config: BcConfig
    has_critic = False

    def __init__(self, config: BcConfig, spec: AgentSpec) -> None:
        super().__init__(config, spec)
        self.policy_updates = config.policy_updates
        self.name = "flow" if config.policy == "flow" else "net"  # of the network's parameters
        flow = config.policy == "flow"
        self.net = FlowPolicy(config.flow, spec) if flow else GaussianPolicy(config.hidden, spec)

    def init(self, rng: jax.Array) -> AgentState:
        return self.fresh_state(key_of(rng, "state"), self.init_policy(key_of(rng, "policy"), self.net, self.name))

    def critic_draws(self, key: jax.Array, batch: ChunkBatch) -> Noise:
        return {}

    def policy_draws(self, key: jax.Array, batch: ChunkBatch) -> Noise:
        return self.net.draws(key, batch)

    def policy_loss(
        self, policy: Params, state: AgentState, base: Params, batch: ChunkBatch, draws: Noise, *, bc_only: bool
    ) -> Loss:
        """Flow matching, or -log pi per dimension, over the steps that `bc_weight` marks."""
        shown = imitated(batch)
        context = self.policy_context(policy, {}, base, shown.observations)
        weight, given = imitated_numbers(shown.bc_weight, shown.bc_dims), self.net.given(shown, draws)
        loss = self.net.loss(policy[self.name], context, shown.actions, weight, given, draws)
        return Loss((loss,), {"actor/bc_loss": loss, "actor/bc_share": mean_of(batch.bc_weight)})

    def acting_noise(self, params: Params, key: jax.Array, observation: Observation, *, explore: bool) -> Noise:
        return self.net.candidate_noise(key, observation, 1, explore=explore)

    def act(
        self, params: Params, base: Params, observation: Observation, noise: Noise, committed: Committed
    ) -> tuple[jax.Array, Metrics]:
        policy = params["policy"]
        context = self.policy_context(policy, {}, base, observation)
        return self.finished(self.net.sample(policy[self.name], context, noise, committed), committed)[0], {}

    def policy_params(self, state: AgentState, *, pretrained: bool = False) -> Params:
        return {"policy": self.acting_policy(state)}

"""Behaviour cloning, by flow matching or with a Gaussian; with interventions it is HG-DAgger (Kelly 2019)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from serl_chunk.agents.base import Agent
from serl_chunk.agents.losses.imitation import imitated, imitated_numbers
from serl_chunk.agents.policies.flow import FlowPolicy
from serl_chunk.agents.policies.gaussian import GaussianPolicy
from serl_chunk.agents.policies.pi0 import Pi0Policy, PublishedPi0Policy
from serl_chunk.agents.spec import AgentSpec
from serl_chunk.agents.state import (
    AgentState,
    Alone,
    Committed,
    Context,
    Loss,
    Metrics,
    Noise,
    Observation,
    Params,
    key_of,
)
from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.models.sums import mean_of
from serl_chunk.types import ChunkBatch


class Bc(Agent):
    """An agent without a critic: an update is the policy's alone, and no batch is drawn for another."""

    config: BcConfig

    def __init__(self, config: BcConfig, spec: AgentSpec) -> None:
        super().__init__(config, spec)
        self.policy_updates = config.policy_updates
        self.net: FlowPolicy | GaussianPolicy | Pi0Policy
        if config.policy == "pi0":
            of = PublishedPi0Policy if config.pi0.published else Pi0Policy
            self.name, self.net = "pi0", of(config.pi0, config.image_keys, spec)
            self.with_base = self.net
        elif config.policy == "flow":
            self.name, self.net = "flow", FlowPolicy(config.flow, spec)
        else:
            self.name, self.net = "net", GaussianPolicy(config.hidden, spec)

    def init(self, rng: jax.Array) -> AgentState:
        key = key_of(rng, "policy")
        if isinstance(self.net, Pi0Policy):  # which has its own encoder
            return self.fresh_state(key_of(rng, "state"), {self.name: self.net.init(key)})
        return self.fresh_state(key_of(rng, "state"), self.init_policy(key, self.net, self.name))

    def pretrained(self, state: AgentState) -> AgentState:
        if not isinstance(self.net, Pi0Policy):
            return super().pretrained(state)
        policy = {self.name: self.net.pretrained(state.policy[self.name])}
        average = jax.tree.map(jnp.copy, policy) if self.config.policy_ema else {}
        return state.replace(policy=policy, policy_average=average)

    def seen(self, state: AgentState, base: Params, batch: ChunkBatch) -> ChunkBatch:
        if not isinstance(self.net, Pi0Policy):
            return super().seen(state, base, batch)
        shown = self.net.augmented(key_of(state.rng, "augment"), batch.observations)
        return batch._replace(observations=dict(shown))

    def shown(self, policy: Params, base: Params, observation: Observation) -> tuple[Params, Context]:
        """The network's parameters, and an observation as it sees it."""
        if isinstance(self.net, Pi0Policy):
            whole = self.net.whole(policy[self.name], base)
            return whole, self.net.context(whole, observation)
        return policy[self.name], self.perception.policy_context(policy, {}, base, observation)

    def policy_draws(self, key: jax.Array, batch: ChunkBatch) -> Noise:
        return self.net.draws(key, batch)

    def policy_loss(
        self, policy: Params, state: AgentState, base: Params, batch: ChunkBatch, draws: Noise, *, bc_only: bool
    ) -> Loss:
        """Flow matching, or -log pi per dimension, over the steps that `bc_weight` marks."""
        shown = imitated(batch)
        net, context = self.shown(policy, base, shown.observations)
        weight, given = imitated_numbers(shown.bc_weight, shown.bc_dims), self.net.given(shown, draws)
        loss = self.net.loss(net, context, shown.actions, weight, given, draws)
        return Loss((loss,), {"actor/bc_loss": loss, "actor/bc_share": mean_of(batch.bc_weight)})

    def acting_noise(
        self, params: Params, key: jax.Array, observation: Observation, *, explore: bool, alone: Alone = False
    ) -> Noise:
        return self.net.candidate_noise(key, observation, 1, explore=explore)

    def act(
        self, params: Params, base: Params, observation: Observation, noise: Noise, committed: Committed,
        alone: Alone = False,
    ) -> tuple[jax.Array, Metrics]:  # fmt: skip
        net, context = self.shown(params["policy"], base, observation)
        return self.finished(self.net.sample(net, context, noise, committed), committed)[0], {}

    def policy_params(self, state: AgentState, *, pretrained: bool = False) -> Params:
        return {"policy": self.acting_policy(state)}

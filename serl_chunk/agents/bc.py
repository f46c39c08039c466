"""Behaviour cloning, by flow matching or with a Gaussian; with interventions it is HG-DAgger (Kelly 2019)."""

from __future__ import annotations

import jax

from serl_chunk.agents.base import Agent
from serl_chunk.agents.losses.imitation import imitated, imitated_numbers
from serl_chunk.agents.policies.choice import policy_of
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
        self.net = policy_of(config, self.perception)
        self.with_base = self.net.with_base

    def init(self, rng: jax.Array) -> AgentState:
        return self.fresh_state(key_of(rng, "state"), self.net.init(key_of(rng, "policy")))

    def pretrained(self, state: AgentState) -> AgentState:
        policy = self.net.pretrained(state.policy, self.place)
        average = self.copied(policy) if self.config.policy_ema else {}
        return state.replace(policy=policy, policy_average=average)

    def seen_by_policy(self, state: AgentState, base: Params, batch: ChunkBatch) -> ChunkBatch:
        return self.net.augmented(state.rng, base, batch)

    def shown(self, policy: Params, base: Params, observation: Observation) -> tuple[Params, Context]:
        """The network's parameters, and an observation as it sees it."""
        return self.net.network(policy, base), self.net.context(policy, base, observation)

    def policy_draws(self, key: jax.Array, batch: ChunkBatch) -> Noise:
        return self.net.draws(key, len(batch.actions))

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

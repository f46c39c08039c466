"""Behaviour cloning, with any policy; with interventions it is HG-DAgger (Kelly 2019)."""

from __future__ import annotations

import jax

from serl_chunk.agents.base import PolicyAgent
from serl_chunk.agents.perception import Perception
from serl_chunk.agents.policies.base import ChunkPolicy
from serl_chunk.agents.policies.flow import FlowPolicy
from serl_chunk.agents.policies.heads import GaussianPolicy, LaplacePolicy
from serl_chunk.agents.policies.pi0 import Pi0Policy, PublishedPi0Policy
from serl_chunk.agents.spec import AgentSpec
from serl_chunk.agents.state import Acted, AgentState, Alone, Committed, Noise, Observation, Params, key_of
from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.agents.policy import PolicyConfig
from serl_chunk.models.sums import Loss
from serl_chunk.types import ChunkBatch


def policy_of(config: PolicyConfig, perception: Perception) -> ChunkPolicy:
    """The policy that `config.policy` names."""
    if config.policy == "pi0":
        return (PublishedPi0Policy if config.pi0.published else Pi0Policy)(config.pi0, perception, config.train_delay)
    if not isinstance(config, BcConfig) or config.policy == "flow":
        return FlowPolicy(config.flow, perception, config.train_delay)
    head = LaplacePolicy if config.policy == "laplace" else GaussianPolicy
    return head(config.hidden, perception)


class Bc(PolicyAgent):
    """An agent without a critic: an update is the policy's alone, and no batch is drawn for another."""

    config: BcConfig

    def __init__(self, config: BcConfig, spec: AgentSpec) -> None:
        super().__init__(config, spec)
        self.policy_updates = config.policy_updates
        self.act_by(policy_of(config, self.perception))

    def init(self, rng: jax.Array) -> AgentState:
        return self.fresh_state(key_of(rng, "state"), self.net.init(key_of(rng, "policy")))

    def policy_loss(
        self, policy: Params, state: AgentState, base: Params, batch: ChunkBatch, draws: Noise, *, bc_only: bool
    ) -> Loss:
        """Flow matching, or -log pi per dimension."""
        return self.imitation(policy, {}, base, batch, draws)[0]

    def acting_noise(self, key: jax.Array, observation: Observation, *, explore: bool, alone: Alone = False) -> Noise:
        return self.net.candidate_noise(key, observation, 1, explore=explore)

    def act(self, params: Params, base: Params, observation: Observation, noise: Noise, committed: Committed) -> Acted:
        policy = params["policy"]
        net, context = self.net.network(policy, base), self.net.context(policy, base, observation)
        return self.finished(self.net.sample(net, context, noise, committed), committed)[0], {}

    def policy_params(self, state: AgentState, *, pretrained: bool = False) -> Params:
        return {"policy": self.acting_policy(state)}

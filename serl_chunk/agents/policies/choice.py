"""The policy that an agent's settings name."""

from __future__ import annotations

from serl_chunk.agents.perception import Perception
from serl_chunk.agents.policies.base import ChunkPolicy
from serl_chunk.agents.policies.flow import FlowPolicy
from serl_chunk.agents.policies.heads import GaussianPolicy, LaplacePolicy
from serl_chunk.agents.policies.pi0 import Pi0Policy, PublishedPi0Policy
from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.agents.policy import PolicyConfig


def policy_of(config: PolicyConfig, perception: Perception) -> ChunkPolicy:
    """The policy that `config.policy` names."""
    if config.policy == "pi0":
        return (PublishedPi0Policy if config.pi0.published else Pi0Policy)(config.pi0, perception, config.train_delay)
    if not isinstance(config, BcConfig) or config.policy == "flow":
        return FlowPolicy(config.flow, perception, config.train_delay)
    head = LaplacePolicy if config.policy == "laplace" else GaussianPolicy
    return head(config.hidden, perception)

"""Settings of acfql, the default."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from serl_chunk.config.agents.base import ActorCriticConfig
from serl_chunk.config.agents.flow import FlowConfig
from serl_chunk.config.fields import setting


@dataclasses.dataclass(frozen=True)
class AcfqlConfig(ActorCriticConfig):
    """Q-chunking with a flow policy (Li, Zhou and Levine 2025): the best of N of its chunks acts."""

    kind: ClassVar[str] = "acfql"
    acting_critic = "target"
    bounded_critic = True
    learns_to_choose = True

    flow: FlowConfig = setting(FlowConfig, "the flow policy")
    policy_ema: float = 0.999
    expectile: float = setting(0.8, "expectile of Q over the data, the V of the critic's target", least=0.5, below=1)
    policy_updates: int = setting(3, "flow updates after the last critic update: same batch, new noise", least=1)

    @property
    def acts_by_flow(self) -> bool:
        return True

    @property
    def samples_delay(self) -> bool:
        return self.flow.train_delay == "sampled"

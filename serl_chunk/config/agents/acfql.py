"""Settings of acfql, the default, and of decoupled, which adds a second critic."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from serl_chunk.config.agents.base import ActorCriticConfig
from serl_chunk.config.agents.flow import FlowConfig
from serl_chunk.config.fields import acting, require, setting


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

    @property
    def as_published(self) -> dict[str, Any]:
        return {**super().as_published, **self.flow.as_published, "actor_num_samples": self.candidates}


@dataclasses.dataclass(frozen=True)
class DecoupledConfig(AcfqlConfig):
    """acfql whose policy is compared by a second critic, of the executed actions (Li, Park and Levine 2025).

    The first critic may score more actions than the policy outputs, `chunk.critic_horizon`, and teaches the second.
    """

    kind: ClassVar[str] = "decoupled"
    prefix_critic = True

    prefix_expectile: float = setting(
        0.8, "of the first critic's value over the data's futures; 0.5: the mean", least=0.5, below=1
    )
    prefix_lengths: int = acting(1, "lengths the second critic can score: equal parts of the executed actions", least=1)
    replan_spread: float | None = acting(None, "disagreement of heads that ends a chunk; none: never", least=0)

    def _check(self) -> None:
        # fmt: off
        if self.replan_spread is not None:
            require(self.prefix_lengths > 1, "agent.replan_spread",
                f"{self.replan_spread} compares lengths of a chunk, and agent.prefix_lengths is "
                f"{self.prefix_lengths}. Set that to 2 or more, or set it to none.")
            require(self.critic.ensemble > 1, "agent.replan_spread",
                f"{self.replan_spread} compares heads, and agent.critic.ensemble is 1. Raise that, or set it to none.")

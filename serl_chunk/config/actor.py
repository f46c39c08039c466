"""The control loop: its clock, and who may take over."""

from __future__ import annotations

import dataclasses
from typing import Literal

from serl_chunk.config.validation import require, require_choices


@dataclasses.dataclass(frozen=True)
class ActorConfig:
    """The control loop (docs/architecture.md, section 7)."""

    clock: Literal["lockstep", "realtime"] = "lockstep"
    delay_ticks: int = 0  # lockstep: ticks between a decision's observation and its chunk
    inference: Literal["auto", "sync", "async"] = "auto"  # realtime; auto: sync if inference p99 < half a tick
    # Plan anew after the steps that a decision asks for (agent.replan_spread), instead of after execute_steps always.
    adaptive_execution: bool = False
    intervention: str = "none"  # none | scripted | path of a recorded intervention file
    max_human_ticks: int = 0  # the intervention source stops after so many ticks of a run; 0: no limit
    max_episodes: int = 0  # 0: until the learner is done

    def __post_init__(self) -> None:
        require_choices(self, "actor.")
        for name in ("delay_ticks", "max_human_ticks", "max_episodes"):
            require(getattr(self, name) >= 0, f"actor.{name} must be >= 0, got {getattr(self, name)}")
        require(
            self.clock == "lockstep" or self.delay_ticks == 0,
            "actor.delay_ticks belongs to clock=lockstep; in real time the delay is measured, not set",
        )

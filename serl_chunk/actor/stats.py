"""Statistics of executed episodes: of one, and merged over the episodes of a session or an evaluation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Self

import numpy as np

from serl_chunk.actor.clock import Lateness
from serl_chunk.types import Outcome


@dataclasses.dataclass(kw_only=True)
class RolloutStats:
    """Counts over executed episodes; they add up."""

    episodes: int = 0
    steps: int = 0  # recorded
    successes: int = 0
    success_steps: int = 0  # of successful episodes
    total_reward: float = 0.0  # undiscounted sum of what was recorded, before scale and offset
    human_ticks: int = 0  # under a human, idle ones included
    segments: int = 0  # interventions
    hold_ticks: int = 0  # recorded as holds: nothing planned, or a human who did not move the robot
    starved_ticks: int = 0  # real time: the policy's turn and nothing planned, also before an episode's first chunk
    gated_ticks: int = 0  # on which the driver executed something else than it was commanded
    gaps: int = 0  # stalls after which the plan was dropped and no window of training goes on

    def merge(self, other: RolloutStats) -> None:
        for field in dataclasses.fields(RolloutStats):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    @classmethod
    def over(cls, parts: Iterable[RolloutStats]) -> Self:
        total = cls()
        for part in parts:
            total.merge(part)
        return total

    @property
    def success_rate(self) -> float:
        return self.successes / max(1, self.episodes)

    @property
    def mean_return(self) -> float:
        return self.total_reward / max(1, self.episodes)

    @property
    def mean_length(self) -> float:
        return self.steps / max(1, self.episodes)


@dataclasses.dataclass(kw_only=True)
class EpisodeSummary(RolloutStats):
    """One episode in figures. `*_share` are 0..1."""

    seed: int
    outcome: Outcome = Outcome.UNKNOWN
    ended_by: str = ""  # who ended it: environment, operator, learner, ...
    fault: str = ""  # why the robot ended it; empty where it did not
    clipped_share: float = 0.0  # of decided action values beyond the robot's limits
    jerk: float = 0.0  # root mean square third difference of executed actions, robot units / s^3
    wall_seconds: float = 0.0  # reset included
    conditions: str = ""  # JSON, see `RobotEnv.conditions`
    lateness: Lateness = dataclasses.field(default_factory=Lateness)

    @property
    def length(self) -> int:
        return self.steps

    @property
    def success(self) -> bool:
        return self.outcome is Outcome.SUCCESS

    @property
    def gated_share(self) -> float:
        return self.gated_ticks / max(1, self.steps)


def commanded_jerk(actions: list[np.ndarray], hz: float) -> float:
    """Root mean square of the third difference of T actions float32[A], times hz^3; 0 for fewer than 4."""
    if len(actions) < 4:
        return 0.0
    third = np.diff(np.asarray(actions, np.float64), n=3, axis=0)
    return float(np.sqrt(np.mean(third**2)) * hz**3)

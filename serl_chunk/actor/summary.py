"""What an episode came to, beside its records."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from serl_chunk.actor.timing import Lateness
from serl_chunk.types import Outcome, Source


class EpisodeSummary(NamedTuple):
    """One episode in figures. Ticks are counts; `*_share` are 0..1."""

    seed: int
    length: int  # recorded steps
    total_reward: float  # undiscounted sum of what was recorded, before scale and offset
    success: bool
    outcome: Outcome
    ended_by: str  # who ended it: environment, operator, learner, ...
    human_ticks: int  # under a person, idle ones included
    segments: int  # interventions
    hold_ticks: int  # recorded as holds: nothing planned, or a person who did not move the robot
    starved_ticks: int  # real time: the policy's turn and nothing planned, also before an episode's first chunk
    clipped_share: float  # of decided action values beyond the robot's limits
    gated_share: float  # of ticks on which the driver executed something else than it was commanded
    jerk: float  # root mean square third difference of executed actions, robot units / s^3
    decisions: int  # chunks that joined
    mean_delay: float  # ticks between a chunk's observation and its first executed action
    wall_seconds: float  # reset included
    lateness: Lateness


@dataclasses.dataclass
class Tally:
    """Counts an episode while it runs."""

    total_reward: float = 0.0
    hold_ticks: int = 0
    starved_ticks: int = 0
    gated_ticks: int = 0
    actions: list[np.ndarray] = dataclasses.field(default_factory=list)
    step_seconds: list[float] = dataclasses.field(default_factory=list)  # real time: what the environment's steps took

    def count(self, source: Source, executed: np.ndarray, reward: float, *, starved: bool, gated: bool) -> None:
        """Account for one executed tick."""
        self.total_reward += reward
        self.hold_ticks += source == Source.HOLD
        self.starved_ticks += starved
        self.gated_ticks += gated
        self.actions.append(executed)


def commanded_jerk(actions: list[np.ndarray], hz: float) -> float:
    """Root mean square of the third difference of T actions float32[A], times hz^3; 0 for fewer than 4."""
    if len(actions) < 4:
        return 0.0
    third = np.diff(np.asarray(actions, np.float64), n=3, axis=0)
    return float(np.sqrt(np.mean(third**2)) * hz**3)

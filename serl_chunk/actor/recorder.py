"""Records of an episode: its executed steps in order with their decisions, and per-episode statistics."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from serl_chunk.actor.clock import Lateness
from serl_chunk.types import Begin, End, Outcome, RecordSink, Source, Step


class EpisodeRecorder:
    """Hands one episode's records to a sink.

    A step whose observation is being decided on waits for that decision, and later steps wait behind it, so
    that the sink sees consecutive ticks. The wait is bounded by the caller of `expect`: a decision that comes
    too late to be executed is given up. An episode without a single step leaves no record.
    """

    def __init__(self, sink: RecordSink, begin: Begin) -> None:
        self._sink = sink
        self._begin: Begin | None = begin
        self._decisions: dict[int, dict[str, np.ndarray]] = {}
        self._awaited: int | None = None
        self._waiting: list[Step] = []
        self.length = 0  # steps handed over or waiting

    def expect(self, tick: int) -> None:
        """The decision on the observation of `tick` is under way; `tick` is the present one."""
        self._awaited = tick

    def decided(self, tick: int, record: dict[str, np.ndarray]) -> None:
        """The decision on the observation of `tick` is there."""
        self._decisions[tick] = record
        if self._awaited == tick:
            self.release()

    def release(self) -> None:
        """Wait for no decision any longer."""
        self._awaited = None
        waiting, self._waiting = self._waiting, []
        for step in waiting:
            self._hand_over(step)

    def step(self, step: Step) -> None:
        """One executed tick."""
        self.length += 1
        if self._awaited is None:
            self._hand_over(step)
        else:
            self._waiting.append(step)

    def end(self, end: End) -> None:
        """Close the episode."""
        self.release()
        if self.length:
            self._sink.end(end)

    def _hand_over(self, step: Step) -> None:
        if self._begin is not None:
            self._sink.begin(self._begin)
            self._begin = None
        self._sink.step(step._replace(decision=self._decisions.pop(step.tick, None)))


class NullSink:
    """A RecordSink that keeps nothing: evaluation, warm-up."""

    def begin(self, record: Begin) -> None:
        """Ignore it."""

    def step(self, record: Step) -> None:
        """Ignore it."""

    def end(self, record: End) -> None:
        """Ignore it."""

    def amend(self, record: object) -> None:
        """Ignore it."""


class EpisodeSummary(NamedTuple):
    """One episode in figures. Ticks are counts; `*_share` are 0..1."""

    seed: int
    length: int  # recorded steps
    total_reward: float  # undiscounted sum of what was recorded, before scale and offset
    success: bool
    outcome: Outcome
    ended_by: str  # who ended it: environment, operator, learner, ...
    human_ticks: int  # under a human, idle ones included
    segments: int  # interventions
    hold_ticks: int  # recorded as holds: nothing planned, or a human who did not move the robot
    starved_ticks: int  # real time: the policy's turn and nothing planned, also before an episode's first chunk
    clipped_share: float  # of decided action values beyond the robot's limits
    gated_share: float  # of ticks on which the driver executed something else than it was commanded
    jerk: float  # root mean square third difference of executed actions, robot units / s^3
    decisions: int  # chunks that joined
    mean_delay: float  # ticks between a chunk's observation and its first executed action
    wall_seconds: float  # reset included
    lateness: Lateness
    gaps: int = 0  # stalls after which the plan was dropped and no window of training goes on


@dataclasses.dataclass
class EpisodeCounters:
    """Counts an episode while it runs."""

    total_reward: float = 0.0
    hold_ticks: int = 0
    starved_ticks: int = 0
    gated_ticks: int = 0
    gaps: int = 0
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

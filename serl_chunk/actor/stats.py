"""Statistics of executed episodes: of one, and merged over the episodes of a session or an evaluation."""

from __future__ import annotations

import array
import contextlib
import dataclasses
import gc
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Self

import numpy as np

from serl_chunk.actor.clock import Clock, Deadlines, Lateness, responsive_interpreter
from serl_chunk.types import End, Outcome

logger = logging.getLogger(__name__)

RATE_TICKS = 10  # steps of the environment are judged after an episode with so many
LONGEST_PAUSE = 600.0  # seconds; an episode that lasts longer collects where the robot holds anyway
OWN_RATE_SHARE = 0.9  # of a tick: an environment whose steps take more leaves too little for the policy


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

    def replace(self, before: RolloutStats, after: RolloutStats) -> None:
        """Count a part that was counted as `before` as `after` instead."""
        for field in dataclasses.fields(RolloutStats):
            name = field.name
            setattr(self, name, getattr(self, name) - getattr(before, name) + getattr(after, name))

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
    task: str = ""  # of a robot that has several
    lateness: Lateness = dataclasses.field(default_factory=Lateness)

    @property
    def length(self) -> int:
        return self.steps

    @property
    def success(self) -> bool:
        return self.outcome is Outcome.SUCCESS

    def judged(self, outcome: Outcome, by: str) -> Self:
        """Return these figures with another outcome, of which `by` decided."""
        success = outcome is Outcome.SUCCESS
        return dataclasses.replace(
            self, outcome=outcome, ended_by=by, successes=int(success), success_steps=success * self.steps
        )

    @property
    def gated_share(self) -> float:
        return self.gated_ticks / max(1, self.steps)


class EpisodeMeter:
    """Collects the statistics of one episode while it runs, which began at `began` s on the loop's clock."""

    def __init__(self, seed: int, began: float) -> None:
        self._summary = EpisodeSummary(seed=seed, episodes=1)
        self._began = began
        self._actions: list[np.ndarray] = []
        self.gaps = 0
        self.fault = self.conditions = self.task = ""
        self.step_seconds: list[float] = []  # real time: what the environment's steps took

    def count(self, executed: np.ndarray, reward: float, *, gated: bool, holds: bool, starved: bool) -> None:
        """Count a step. `executed`: float32[A]; see `RolloutStats` for the others."""
        self._actions.append(executed)
        self._summary.total_reward += reward
        self._summary.gated_ticks += gated
        self._summary.hold_ticks += holds
        self._summary.starved_ticks += starved

    def summary(
        self, end: End, hz: float, *, now: float, clipped_share: float, lateness: Lateness | None
    ) -> EpisodeSummary:
        """Return the finished episode in figures, without those of its interventions."""
        stats = self._summary
        stats.gaps, stats.fault, stats.conditions, stats.task = self.gaps, self.fault, self.conditions, self.task
        stats.wall_seconds = now - self._began
        stats.steps, stats.outcome, stats.ended_by = end.length, end.outcome, end.outcome_by
        stats.successes, stats.success_steps = int(stats.success), stats.success * stats.steps
        stats.clipped_share = clipped_share
        stats.jerk = commanded_jerk(self._actions, hz)
        stats.lateness = lateness or stats.lateness
        return stats


def commanded_jerk(actions: list[np.ndarray], hz: float) -> float:
    """Root mean square of the third difference of T actions float32[A], times hz^3; 0 for fewer than 4."""
    if len(actions) < 4:
        return 0.0
    third = np.diff(np.asarray(actions, np.float64), n=3, axis=0)
    return float(np.sqrt(np.mean(third**2)) * hz**3)


class Pacing:
    """Ticks of a session: their clock, and in real time how well their rate is kept.

    In real time garbage is collected between episodes: with JAX's 227,000 objects a full collection takes 111 to
    118 ms, five ticks of a robot at 50 Hz. `period`: seconds of a tick.
    """

    def __init__(self, clock: Clock, period: float, *, realtime: bool) -> None:
        self.clock, self._period, self._realtime = clock, period, realtime
        self._frozen, self._collected = False, clock.now()
        self._late = array.array("d")  # seconds, every tick
        self._missed_periods = 0
        self._rate_judged = False

    def deadlines(self) -> Deadlines | None:
        return Deadlines(self.clock, self._period) if self._realtime else None

    @contextlib.contextmanager
    def episode(self) -> Iterator[None]:
        """Enclose an episode: collect nothing until it ends, then everything; an error is passed on at once."""
        if not self._realtime:
            yield
            return
        enabled = gc.isenabled()
        gc.disable()
        self._collected = self.clock.now()
        try:
            with responsive_interpreter():
                yield
            self._collect()
        finally:
            if enabled:
                gc.enable()

    def holding(self) -> None:
        """Collect within an episode that goes on for long: the robot was just commanded to stay where it is."""
        if self._realtime and self.clock.now() - self._collected > LONGEST_PAUSE:
            self._collect()

    def freeze(self) -> None:
        """Leave current objects, compiled inference above all, out of every later collection."""
        self._frozen = self._frozen or not gc.get_freeze_count()  # what others froze stays so
        self._collect()
        gc.freeze()

    def close(self) -> None:
        if self._frozen:
            gc.unfreeze()
            self._frozen = False

    def _collect(self) -> None:
        gc.collect()
        self._collected = self.clock.now()

    def add(self, deadlines: Deadlines) -> None:
        self._late.extend(deadlines.lateness)
        self._missed_periods += deadlines.missed_periods

    def lateness(self) -> Lateness:
        return Lateness.of(self._late, self._missed_periods)

    def warn(self, episode_id: str, stats: EpisodeSummary, deadlines: Deadlines, step_seconds: Sequence[float]) -> None:
        """Warn of an episode's stalls, and once of an environment whose steps, in seconds, fill the tick."""
        if not self._rate_judged and len(step_seconds) >= RATE_TICKS:
            self._rate_judged = True
            if warning := _slow_step_warning(step_seconds, self._period):
                logger.warning(warning)
        if stats.gaps:
            logger.warning(
                f"the control loop stalled in episode {episode_id} (gaps={stats.gaps}, longest "
                f"{max(deadlines.lateness):.2f} s): the plan was dropped, and training sees no window across a gap"
            )


def _slow_step_warning(seconds: Sequence[float], period: float) -> str:
    """Warning where steps of the environment, in seconds, fill the tick's `period`; empty where they do not."""
    if len(seconds) == 0 or (p50 := float(np.median(seconds))) < OWN_RATE_SHARE * period:
        return ""
    return (
        f"a step of the environment takes {p50 * 1e3:.1f} ms (median) of a tick of {period * 1e3:.1f} ms: too little "
        "is left for the policy, so ticks begin late and the robot may run below robot.control_hz. If step() sleeps to "
        "keep a rate of its own, let it sleep less (docs/your_robot.md, section 7). Otherwise lower "
        "robot.control_hz"
    )

"""When a learner evaluates its own policy between two updates; how it does so is its owner's affair."""

from __future__ import annotations

from typing import Protocol

from serl_chunk.learner.run_metrics import Counters, RunMetrics
from serl_chunk.types import Snapshot

BY_LEARNER = "learner"  # `by` of the rows that such an evaluation writes


class Evaluate(Protocol):
    """Evaluates a policy on held-out starts and writes down what came of it."""

    def __call__(self, snapshot: Snapshot, counters: Counters) -> None:
        """Evaluate, and write it down unless it was cut short."""

    def close(self) -> None:
        """Let go of the environment."""


class Schedule:
    """At every multiple of `interval` updates, once each, and where `now` asks for one beside them.

    `last` is the step of the newest evaluation: of an earlier life, on a resume.
    """

    def __init__(self, interval: int, last: int = 0) -> None:
        self._interval, self.last = interval, last

    def due(self, step: int, *, now: bool = False) -> bool:
        """Whether the policy of `step` is to be evaluated; `now`: also where no multiple was passed."""
        if not self._interval or step == self.last:
            return False
        return now or step // self._interval != self.last // self._interval


def last_evaluated(metrics: RunMetrics) -> int:
    """Step of a run's newest evaluation by its learner; 0 without any."""
    return max((row["step"] for row in metrics["eval"] if row.get("by") == BY_LEARNER), default=0)

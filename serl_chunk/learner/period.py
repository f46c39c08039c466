"""Sums since the last metric row, and the rates they come to."""

from __future__ import annotations

import time
from typing import Any


class Period:
    """What the training loop adds up between two metric rows; times in seconds."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.updates = self.logged_updates = self.env_steps = 0
        self.waited = self.actors_waited = self.sampling = 0.0
        self.last_metrics: Any = None

    def rates(self, env_steps: int, now: float) -> dict[str, float]:
        """Rates, waits and timers since the last row, under their metric names."""
        seconds = self.seconds(now)
        done = self.updates - self.logged_updates
        return {
            "rates/updates_per_s": done / seconds,
            "rates/env_steps_per_s": (env_steps - self.env_steps) / seconds,
            "wait/learner_s": self.waited,
            "wait/actor_s": self.actors_waited,
            "timer/sample_replay_buffer": self.sampling / max(done, 1),
            "timer/train": (seconds - self.waited - self.sampling) / max(done, 1),
        }

    def waits(self, now: float) -> tuple[float, float]:
        """Shares of the time since the last row: the learner waited for steps, the actors for updates."""
        return self.waited / self.seconds(now), self.actors_waited / self.seconds(now)

    def seconds(self, now: float) -> float:
        """Since the last row, positive."""
        return max(now - self.start, 1e-9)

    def leave_out(self, seconds: float, env_steps: int) -> None:
        """Forget a stretch in which nothing was trained, with the steps that came in meanwhile."""
        self.start += seconds
        self.env_steps += env_steps

    def begin_anew(self, env_steps: int, now: float) -> None:
        """A metric row was written."""
        self.start, self.env_steps, self.logged_updates = now, env_steps, self.updates
        self.waited = self.sampling = self.actors_waited = 0.0

"""The control clock: an injected source of time, absolute deadlines and their lateness, and what keeps them."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from serl_chunk.types import gap_tolerance

SWITCH_INTERVAL = 0.0005  # seconds; the interpreter's default of 5 ms is a quarter of a 50 Hz tick


class Clock:
    """A source of time: the machine's monotonic clock, or a subclass."""

    def now(self) -> float:
        return time.monotonic()

    def sleep_until(self, moment: float) -> None:
        """Return at `moment`, or at once where it has passed."""
        left = moment - time.monotonic()
        if left > 0:
            time.sleep(left)


class Lateness(NamedTuple):
    """Lateness of ticks against their absolute deadlines. All zero under the lockstep clock."""

    p50_ms: float = 0.0
    p99_ms: float = 0.0
    max_ms: float = 0.0
    missed_periods: int = 0  # whole periods lost: the grid of deadlines was moved instead of rushing the robot

    @classmethod
    def of(cls, seconds: Sequence[float], missed_periods: int) -> Lateness:
        if len(seconds) == 0:
            return cls()
        p50, p99, worst = np.percentile(seconds, (50, 99, 100)) * 1e3
        return cls(float(p50), float(p99), float(worst), missed_periods)


class Deadlines:
    """Tick t of an episode begins at `start + t * period`, whatever earlier ticks took.

    A tick that begins more than a whole period late moves the grid by whole periods and counts them: running the
    missed ticks back to back would command the robot several times as fast as planned.
    """

    def __init__(self, clock: Clock, period: float) -> None:
        self._clock, self.period = clock, period
        self._start = self.began = clock.now()  # `began`: when the last tick that was waited for began
        self.lateness: list[float] = []  # seconds, one per tick
        self.missed_periods = 0
        self.tolerance = gap_tolerance(period)  # seconds; what comes later comes after a gap

    def wait(self, tick: int) -> int:
        """Wait for the deadline of `tick`; returns the whole periods lost where it comes after a gap, else 0."""
        deadline = self._start + tick * self.period
        self._clock.sleep_until(deadline)
        self.began = self._clock.now()
        late = max(0.0, self.began - deadline)
        self.lateness.append(late)
        lost = int(late / self.period)
        if lost:
            self.missed_periods += lost
            self._start += lost * self.period
        return lost if late > self.tolerance else 0

    def stalled(self, since: float) -> bool:
        """Return whether more time has passed since the moment `since` than may pass within a tick."""
        return self._clock.now() - since > self.tolerance


@contextlib.contextmanager
def responsive_interpreter() -> Iterator[None]:
    """Switch threads after 0.5 ms instead of 5, for the control thread."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL)
    try:
        yield
    finally:
        sys.setswitchinterval(before)

"""Stamps of a robot's own clock as moments of the loop's clock, and what they show of a stop."""

from __future__ import annotations

import math
from typing import Callable, Optional, Tuple

from serl_chunk_robot.drivers.base import Driver

HALF = 2.5  # s; offsets of the last 2.5 to 5 s count, in which clocks that drift by 200 ppm part by 1 ms
ROUNDS = 2  # that failed in a row: a fault


class StampMap:
    """Maps stamps by the message that travelled the shortest time of the last seconds.

    The clocks need nothing in common but their rate. A message that was delayed on its way is as old as it is, and one
    that is repeated gets older. Where the robot's clock is set back, stamps are too old for 5 s at most.
    """

    def __init__(self) -> None:
        self._now = self._before = math.inf  # the least offset of this half of the window, and of the one before it
        self._ends = -math.inf

    def moment(self, stamp: float, arrival: float) -> float:
        """Map a stamp, s, of a message that arrived at `arrival` on the loop's clock. Never later than the arrival."""
        if arrival >= self._ends:
            self._before = self._now if arrival < self._ends + HALF else math.inf
            self._now, self._ends = math.inf, arrival + HALF
        self._now = min(self._now, arrival - stamp)
        return stamp + min(self._now, self._before)


class StampedDriver(Driver):
    """A driver whose robot answers a stop by a state alone: one that is newer than the stop."""

    _clock: Callable[[], float]
    _stopped: Optional[Tuple[int, float]] = None  # level, since when

    def stop(self, reason: str, level: int = 0) -> bool:
        """Return whether states came since. At every level the motors stand at their last set point.

        The measured pose is no target: motors that do not answer may read anything.
        """
        now, stamp = self._clock(), self.read().stamp
        if self._stopped is None or self._stopped[0] != level:
            self._stopped = level, now
        answered = stamp > self._stopped[1]
        self._stopped = None if answered else self._stopped
        return answered


class Failures:
    """A fault that lasts until it is cleared, and rounds that failed in a row.

    Written by the driver's thread; the loop's clears what lasts.
    """

    def __init__(self) -> None:
        self.lasting = ""
        self._rounds, self._why = 0, ""

    def failed(self, why: str) -> None:
        self._why = why
        self._rounds += 1

    def worked(self) -> None:
        self._rounds = 0

    @property
    def silent(self) -> str:
        """Why the last rounds failed; empty while it is fewer than ROUNDS."""
        return self._why if self._rounds >= ROUNDS else ""

"""Stamps of a robot's own clock as moments of the loop's clock, and what they show of a stop."""

from __future__ import annotations

import math
from typing import Optional, Tuple

HALF = 2.5  # s; offsets of the last 2.5 to 5 s count, in which clocks that drift by 200 ppm part by 1 ms


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


class StopAnswer:
    """The answer of a robot to a stop, whose only sign is a state that is newer than the stop."""

    def __init__(self) -> None:
        self._stopped: Optional[Tuple[int, float]] = None  # level, since when

    def given(self, level: int, now: float, stamp: float) -> bool:
        """Return whether a state's stamp is newer than the first call with this level, after the last answer."""
        if self._stopped is None or self._stopped[0] != level:
            self._stopped = level, now
        if stamp <= self._stopped[1]:
            return False
        self._stopped = None
        return True

"""Counters and rates, under one naming scheme at both ends: plain counts, `*_per_s`, `*_bytes`, `*_s`."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable

Clock = Callable[[], float]


class Counters(collections.Counter[str]):
    """Named counts. Written by one thread, read by any: a reader may be one event behind."""

    def __init__(self, *names: str) -> None:
        """Every name in `names` is reported from the start, so that a zero is visible."""
        super().__init__({name: 0 for name in names})


class Rate:
    """Events per second over a sliding window."""

    def __init__(self, window: float = 5.0, clock: Clock = time.monotonic) -> None:
        self._window = window  # seconds
        self._clock = clock
        self._started = clock()
        self._events: collections.deque[tuple[float, int]] = collections.deque()

    def add(self, n: int) -> None:
        """Count `n` events now."""
        now = self._clock()
        # Events within a twentieth of the window share an entry, which bounds the memory.
        if self._events and now - self._events[-1][0] < self._window / 20:
            self._events[-1] = (self._events[-1][0], self._events[-1][1] + n)
        else:
            self._events.append((now, n))
        while self._events[0][0] < now - self._window:
            self._events.popleft()

    def per_second(self) -> float:
        """Events per second over the window, or since the start where that is shorter. Safe from any thread."""
        now = self._clock()
        total = sum(n for at, n in list(self._events) if at >= now - self._window)
        return total / max(min(self._window, now - self._started), 1e-3)


def in_words(nbytes: float) -> str:
    """A size: `312 KiB`, `34 MiB`, `1.2 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 10 else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} GiB"

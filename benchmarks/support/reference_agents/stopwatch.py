"""Times of single calls. Needs the standard library only, in any interpreter."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable


class Stopwatch:
    """Times `update(i)`, which says how many updates it made, and `decide(i)`; calls both `warm` times to compile."""

    def __init__(self, update: Callable[[int], int], decide: Callable[[int], None], warm: int = 2) -> None:
        self._update, self._decide = update, decide
        for i in range(warm):
            update(i)
            decide(i)

    def updates(self, seconds: float) -> dict[str, list[float]]:
        """Milliseconds per update, of every call within `seconds`: on the clock, and of processor time."""
        return _timed(self._update, seconds)

    def decisions(self, seconds: float) -> dict[str, list[float]]:
        """Milliseconds per decision."""

        def one(i: int) -> int:
            self._decide(i)
            return 1

        return _timed(one, seconds)


def _timed(call: Callable[[int], int], seconds: float) -> dict[str, list[float]]:
    out: dict[str, list[float]] = {"ms": [], "cpu_ms": []}
    begin, i = time.perf_counter(), 0
    while not i or time.perf_counter() - begin < seconds:
        start, busy = time.perf_counter(), _processor_seconds()
        count = call(i)
        out["ms"].append(1e3 * (time.perf_counter() - start) / count)
        out["cpu_ms"].append(1e3 * (_processor_seconds() - busy) / count)
        i += 1
    return out


def peak_megabytes() -> float:
    """The most memory this process has had, its compilations included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime

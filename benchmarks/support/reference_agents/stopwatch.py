"""What all contestants of updates.py have. Needs the standard library only, in any interpreter."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable


class Contestant:
    """Updates and decisions of an agent, timed call by call, in a process of its own."""

    def _update(self, i: int) -> int:
        """Make updates, and return how many."""
        raise NotImplementedError

    def _decide(self, i: int) -> None:
        raise NotImplementedError

    def compile(self, times: int = 2) -> None:
        """Make the first calls, which compile."""
        for i in range(times):
            self._update(i)
            self._decide(i)

    def updates(self, seconds: float) -> dict[str, list[float]]:
        """Milliseconds per update, of every call within `seconds`: on the clock, and of processor time."""
        return _timed(self._update, seconds)

    def decisions(self, seconds: float) -> dict[str, list[float]]:
        return _timed(lambda i: self._decide(i) or 1, seconds)

    def memory(self) -> float:
        """The most megabytes this process has had, its compilations included."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _timed(call: Callable[[int], int], seconds: float) -> dict[str, list[float]]:
    out: dict[str, list[float]] = {"ms": [], "cpu_ms": []}
    begin, i = time.perf_counter(), 0
    while not i or time.perf_counter() - begin < seconds:
        start, busy = time.perf_counter(), time.process_time()
        count = call(i)
        out["ms"].append(1e3 * (time.perf_counter() - start) / count)
        out["cpu_ms"].append(1e3 * (time.process_time() - busy) / count)
        i += 1
    return out

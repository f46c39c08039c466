"""Figures of a control loop as the operator's console shows them, from what the loop reports on each tick."""

from __future__ import annotations

import collections
from typing import Any

from serl_chunk.types import End, Outcome

PERIOD = 1.0  # seconds over which a rate is counted
TICKS = 250  # whose lateness is shown
WINDOW = 600.0  # seconds in which successes are counted ...
LEAST = 60.0  # ... of which so many are assumed at least, for the first success is no trend


class SessionFigures:
    """Rate, lateness, human share, successes and pauses since the process's first tick."""

    def __init__(self) -> None:
        self._late: collections.deque[float] = collections.deque(maxlen=TICKS)
        self._successes: collections.deque[float] = collections.deque()
        self._rate: float | None = None
        self._counted, self._since = 0, 0.0  # ticks since then
        self._ticks = self._human = 0
        self._began: float | None = None
        self._paused: float | None = None

    def tick(self, now: float, *, by_human: bool, late: float | None) -> None:
        """Count a tick. `late`: seconds after its deadline; None where it has none."""
        if self._began is None:
            self._began = self._paused = now
        if not self._counted:
            self._since = now
        elif now - self._since >= PERIOD:
            self._rate, self._counted, self._since = self._counted / (now - self._since), 0, now
        self._counted += 1
        self._ticks += 1
        self._human += by_human
        if late is not None:
            self._late.append(late)

    def rest(self) -> None:
        """Note that no ticks follow: the next one begins a new rate."""
        self._counted = 0

    def pause(self, now: float) -> None:
        """Note that the robot waits for the operator, or holds for one."""
        self._paused = now

    def ended(self, end: End, now: float) -> None:
        if end.outcome is Outcome.SUCCESS:
            self._successes.append(now)

    def fields(self, now: float) -> dict[str, Any]:
        """Return fields of ConsoleState."""
        if self._began is None or self._paused is None:
            return {}
        while self._successes and now - self._successes[0] > WINDOW:
            self._successes.popleft()
        late = sorted(self._late)
        span = min(max(now - self._began, LEAST), WINDOW)
        return {
            "rate": self._rate,
            "lateness_p50": 1e3 * late[len(late) // 2] if late else None,
            "lateness_p99": 1e3 * late[int(0.99 * (len(late) - 1))] if late else None,
            "human_share": self._human / self._ticks,
            "successes": len(self._successes) * WINDOW / span,
            "since_pause": (now - self._paused) / 60,
        }

"""When a controller counts as silent: the time that a command is valid, lapses, and rejections in a row."""

from __future__ import annotations

from typing import List

from serl_chunk_robot.safety.table import BRAKE, HOLD, RUN

LEAST_VALIDITY = 0.08  # s
VALID_TICKS = 1.5
SILENCE = 1.0  # s without a valid command between arm and release: latches
LAPSES, LAPSES_WITHIN = 3, 60.0  # so many within so many seconds latch
REJECTED_IN_A_ROW = 10


class Watchdog:
    """Times are the loop's, s. `tick`: seconds of a control tick."""

    def __init__(self, tick: float) -> None:
        self.validity = max(LEAST_VALIDITY, VALID_TICKS * tick)
        self._expects = False  # between arm and release, lapses included
        self._valid_at = 0.0
        self._rejected = 0
        self._lapses: List[float] = []

    def armed(self, now: float) -> None:
        self._expects, self._valid_at, self._rejected = True, now, 0

    def commanded(self, now: float) -> None:
        self._valid_at, self._rejected = now, 0

    def rejected(self) -> None:
        """A command was not taken: it renews nothing."""
        self._rejected += 1

    def released(self) -> None:
        """Released or stopped: nothing is expected until the next arm."""
        self._expects = False

    def event(self, now: float, state: str) -> str:
        """The table's event that is due; empty where there is none."""
        self._expects &= state in (RUN, BRAKE, HOLD)  # neither stopped nor moved by the server
        if not self._expects:
            return ""
        if now - self._valid_at > SILENCE:
            self._expects = False
            return "silence"
        if state != RUN:
            return ""
        if self._rejected >= REJECTED_IN_A_ROW:
            self._expects = False
            return "rejected"
        if now - self._valid_at <= self.validity:
            return ""
        self._lapses = [t for t in self._lapses if now - t < LAPSES_WITHIN] + [now]
        if len(self._lapses) < LAPSES:
            return "lapse"
        self._expects, self._lapses = False, []
        return "lapses"

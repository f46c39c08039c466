"""What draws the operator's attention while a policy acts: the alarm, the notice that is shown, and the hold."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from serl_chunk.attention.alarm import Alarm, Watch

logger = logging.getLogger(__name__)


class Attention:
    """Watches the decisions of an actor. `notice` is what the operator should look at; it rings once where it changes.

    A notice lasts until a human takes over, the operator goes on after a hold, or the next episode begins. Nothing is
    carried over from before one of these: the next decision is the first one that counts.

    Args:
        alarm: None: nothing is watched.
        holds: whether the alarm also holds the robot.
    """

    def __init__(self, alarm: Alarm | None = None, *, holds: bool = False) -> None:
        self._watch = None if alarm is None else Watch(alarm)
        self._holds, self._held = holds, False
        self.notice = ""

    def begin(self) -> None:
        """Begin an episode."""
        self.notice, self._held = "", False
        self._restart()

    def tick(self, *, by_human: bool, holding: bool) -> None:
        """Note who acts on the next tick: a human, the policy, or none, while the robot holds."""
        if by_human or (self._held and not holding):
            self.notice = ""
        if by_human or holding:
            self._restart()
        self._held = holding

    def decided(self, record: Mapping[str, Any]) -> bool:
        """Look at the record of a decision that is to be executed; return whether the robot is to hold."""
        if self._watch is None or not (text := self._watch.decided(record)):
            return False
        logger.warning(f"attention: {text}")
        self.notice = f"look: {text}"
        return self._holds

    def _restart(self) -> None:
        if self._watch is not None:
            self._watch.restart()

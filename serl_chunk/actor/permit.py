"""Whether an operator lets a robot move: holds, stops, and the countdown before each motion."""

from __future__ import annotations

from collections.abc import Callable

COUNTDOWN = 2.0  # seconds before a motion


def nothing() -> None:
    """Do nothing at the end of a countdown but let the robot move."""


class Permit:
    """One robot's permission to move. All calls come from the control loop's thread.

    Attributes:
        held: until "go on".
        latched: a stop was requested here, and not cleared since.
        granted: a countdown has ended, and nothing has stopped the robot since.
    """

    def __init__(self, countdown: float = COUNTDOWN) -> None:
        self.held = self.latched = self.granted = False
        self._countdown = countdown
        self._until: float | None = None
        self._then: Callable[[], None] = nothing

    @property
    def counts(self) -> bool:
        """Whether a countdown runs."""
        return self._until is not None

    def seconds(self, now: float) -> float | None:
        """Return the seconds until the robot moves; None without a countdown."""
        return None if self._until is None else max(0.0, self._until - now)

    def hold(self) -> None:
        self.held, self.granted, self._until = True, False, None

    def stop(self) -> None:
        self.hold()
        self.latched = True

    def begin(self, now: float, then: Callable[[], None] = nothing) -> None:
        """Count down, and call `then` at the end, where nothing ends the countdown before."""
        self._until, self._then = now + self._countdown, then

    def elapse(self, now: float) -> bool:
        """End a countdown that is over; returns whether one was. Call it after the keys: a stop in this tick wins."""
        if self._until is None or now < self._until:
            return False
        self._until, self.held, self.granted = None, False, True
        self._then()
        return True

"""Whether an operator lets a robot move: holds, stops, and the countdown before each motion."""

from __future__ import annotations

from collections.abc import Callable

from serl_chunk.actor.interfaces import RobotRequests

COUNTDOWN = 2.0  # seconds before a motion
AT_ONCE = 1.0  # seconds: a countdown whose end no poll saw for so long, or a permission of that age, moves nothing
BRAKE_SECONDS, BRAKE_AGAIN = 1.0, 0.1  # after a hold: for so long a reset that had been requested is braked as well


def nothing() -> None:
    """Do nothing at the end of a countdown but let the robot move."""


def at_once() -> bool:
    """Agree to a motion at the end of its countdown."""
    return True


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
        self._ended = 0.0  # the last countdown
        self._lasts = self._called = False  # called: `then`
        self._then: Callable[[], object] = nothing
        self._agreed: Callable[[], bool | None] = at_once

    @property
    def counts(self) -> bool:
        """Whether a countdown runs."""
        return self._until is not None

    @property
    def lasts(self) -> bool:
        """Whether a countdown runs that lasts beyond the end of an episode."""
        return self.counts and self._lasts

    def seconds(self, now: float) -> float | None:
        """Return the seconds until the robot moves; None without a countdown."""
        return None if self._until is None else max(0.0, self._until - now)

    def hold(self) -> None:
        self.held, self.granted, self._until = True, False, None

    def stop(self) -> None:
        self.hold()
        self.latched = True

    def release(self) -> None:
        """End a hold, and a countdown: the next motion has its own."""
        self.held, self.granted, self._until = False, False, None

    def begin_episode(self) -> None:
        """Begin an episode, whose reset has its own countdown: none goes on but one that `lasts`."""
        self.granted = False
        if not self._lasts:
            self._until = None

    def is_granted(self, now: float) -> bool:
        """Return whether a motion may begin at once, for which a countdown has ended just now."""
        self.granted = self.granted and now - self._ended < AT_ONCE
        return self.granted

    def begin(
        self, now: float, then: Callable[[], object] = nothing, *, lasts: bool = False,
        agreed: Callable[[], bool | None] = at_once,
    ) -> None:  # fmt: skip
        """Count down, and call `then` at the end, where nothing ends the countdown before.

        Args:
            lasts: beyond the end of an episode, and what follows is a hold.
            agreed: polled after `then`. None: the countdown stays at its end; False: the robot holds.
        """
        self._until, self._then, self._lasts = now + self._countdown, then, lasts
        self._agreed, self._called = agreed, False

    def elapse(self, now: float) -> bool:
        """End a countdown that is over; returns whether one was. Call it after the keys: a stop in this tick wins."""
        if self._until is None or now < self._until:
            return False
        if not self._called:
            if now - self._until > AT_ONCE:  # no one saw it count
                self.hold()
                return False
            self._called = True
            self._then()
        agreed = self._agreed()
        if agreed is None:
            return False
        if not agreed:
            self.hold()
            return False
        self._until, self._ended, self.held, self.granted = None, now, self._lasts, not self._lasts
        return True


class Brake:
    """A hold of a server's own motions. A reset that was requested just before the hold may begin after it.

    Args:
        robot: None: it is in this process.
    """

    def __init__(self, robot: RobotRequests | None) -> None:
        self._robot = robot
        self._until = self._braked_at = -1.0

    def begin(self, now: float) -> None:
        """Brake what moves now, or begins to within `BRAKE_SECONDS`."""
        self._until = now + BRAKE_SECONDS
        self.look(now)

    def look(self, now: float) -> None:
        """Request a hold where the robot moves. Call it on each poll."""
        if now < self._until and now - self._braked_at >= BRAKE_AGAIN and self._robot and self._robot.moving:
            self._braked_at = now
            self._robot.request("hold")

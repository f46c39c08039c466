"""Whether an operator lets a robot move: holds, stops, countdowns, and what an episode waits for."""

from __future__ import annotations

import logging
from collections.abc import Callable

from serl_chunk.console.view import Obstacle
from serl_chunk.devices.leader_requests import LeaderDrives

COUNTDOWN = 2.0  # seconds before a motion
AT_ONCE = 1.0  # seconds: a countdown whose end no poll saw for so long, or a permission of that age, moves nothing

logger = logging.getLogger(__name__)

Wait = Callable[..., bool]
"""Polls the operator, shows why (Obstacles) the episode does not begin, and waits a moment. It returns whether the
episode may still begin without another reset."""


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


def confirm_scene(permit: Permit, wait: Wait, go: str) -> bool:
    """Wait for "scene ready" and its countdown; returns whether it came. `go`: its key."""
    permit.granted = False
    why = Obstacle("the scene is not confirmed", f"look at it, then press {go}")
    while not permit.granted and wait(why):
        pass
    return permit.granted


def drive_leaders(drives: LeaderDrives | None, permit: Permit, wait: Wait) -> bool:
    """Drive leaders to their arms; returns whether they are there.

    A hold, a stop and a drive that failed take their torque. The robot then holds until the operator goes on, which
    begins another drive after the countdown.
    """
    while drives is not None:
        drives.begin()
        while drives.poll():
            if not wait(*(Obstacle(*each) for each in drives.remarks())):
                drives.cancel()
                return False
            if permit.held or permit.counts:
                drives.cancel()
                break
        else:
            if not drives.failed:
                break
            logger.warning(f"leaders: {drives.failed}. Put them at their arms by hand, or go on to drive them again\a")
            permit.hold()
        while permit.held or permit.counts:
            if not wait():
                return False
        permit.granted = False
    return True

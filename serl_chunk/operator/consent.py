"""What an operator lets a robot's server do. Each request counts for the state that was shown at the key press."""

from __future__ import annotations

import logging
from collections.abc import Callable

from serl_chunk.actor.interfaces import RobotRequests
from serl_chunk.operator.motion_permit import Permit
from serl_chunk.types import ShownRobot
from serl_chunk_robot.client.client import UNCONFIRMED

logger = logging.getLogger(__name__)

SERVER = "the server"  # that holds a robot whose controller is gone


class Consent:
    """The requests of one operator, whose calls come from the control loop's thread, but for `request`.

    A robot that is HELD goes on by `go` alone. Only a key at a terminal or a page sends it, with what was shown then.

    Args:
        robot: None: it is in this process.
        permit: of the motions that the process begins.
    """

    def __init__(self, robot: RobotRequests | None, permit: Permit) -> None:
        self._robot, self.permit = robot, permit
        self._held_in = -1  # generation of the newest hold that was noticed

    @property
    def held(self) -> bool:
        """Whether no controller may move the robot before `go`."""
        return self._robot is not None and self._robot.held

    @property
    def shown(self) -> ShownRobot | None:
        """The newest state, to be shown."""
        return None if self._robot is None else self._robot.shown

    def differs(self, before: ShownRobot | None) -> bool:
        """Return whether the robot's generation is another one now."""
        return before is not None and self._robot is not None and self._robot.shown.generation != before.generation

    @property
    def alarm(self) -> str:
        """What the operator has to do where the robot did not confirm a stop; empty where it did."""
        return UNCONFIRMED if self._robot is not None and self._robot.unconfirmed else ""

    def request(self, op: str, shown: ShownRobot | None = None) -> None:
        """Send a request soon, where there is a server. From any thread."""
        if self._robot is not None:
            self._robot.request(op, shown)

    def newly_held(self, *, inside: bool) -> bool:
        """Return whether the robot was held since the last look. Its server also holds it before it is parked.

        Args:
            inside: an episode, in which it brakes before it is HELD.
        """
        robot = self._robot
        if robot is None or not (robot.held or (inside and robot.why.startswith("held by "))):
            return False
        before, self._held_in = self._held_in, robot.shown.generation
        return before != self._held_in and not (self.permit.lasts and robot.shown.held_by == SERVER)

    def go(
        self, now: float, shown: ShownRobot | None, *, by_key: bool, scene: bool, resume: Callable[[], None]
    ) -> None:
        """Go on after the countdown.

        Args:
            shown: the state that stood on the screen at the key, or when a pedal or gesture requested it.
            by_key: whether a key did, at a terminal or a page.
            scene: whether the scene is waited for, and not a hold alone.
            resume: lets devices command again.
        """
        robot, permit = self._robot, self.permit
        if permit.counts or (robot is not None and not robot.idle):  # its state is of before
            return
        if robot is not None and robot.held:

            def let_go() -> None:
                resume()
                robot.request("go", shown)

            if why := _hindered(robot, shown, by_key):
                logger.warning(f"cannot go on: {why}")
            else:
                permit.begin(now, let_go, agreed=lambda: _agreed(robot))
        elif robot is not None and robot.moving and robot.waiting:
            permit.begin(now, lambda: robot.request("proceed", shown))
        elif permit.held or scene:
            permit.begin(now, resume)


def _hindered(robot: RobotRequests, shown: ShownRobot | None, by_key: bool) -> str:
    """Return why no `go` is sent; empty where it is."""
    if not by_key:
        return "the robot is held by its server, and only a key at the terminal or the page lets it go on"
    if not robot.may_clear:
        return "this machine's key is a controller's alone; an operator's machine runs: serl-chunk robot go"
    if shown is None or shown.process != robot.process:
        who = (shown and shown.controller) or "no actor"
        return f"{who} controlled the robot as it was shown, and not this one. Look at it, and press again"
    return ""


def _agreed(robot: RobotRequests) -> bool | None:
    """Return whether the server took `go`; None before it answered."""
    return not robot.held if robot.idle else None

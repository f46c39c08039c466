"""What an operator lets a robot's server do. Each request counts for the state that was shown at the key press."""

from __future__ import annotations

import logging
from collections.abc import Callable

from serl_chunk.actor.interfaces import RobotRequests
from serl_chunk.console.view import Obstacle
from serl_chunk.operator.motion_permit import Permit
from serl_chunk.types import ShownRobot

logger = logging.getLogger(__name__)

SERVER = "the server"  # that holds a robot whose controller is gone
BRAKE_SECONDS, BRAKE_AGAIN = 1.0, 0.1  # after a hold: for so long a reset that had been requested is braked as well


class Consent:
    """The requests of one operator, whose calls come from the control loop's thread.

    A robot that is HELD goes on by `go` alone. Only a key at a terminal or a page sends it, with what was shown then.
    """

    def __init__(self, robot: RobotRequests, permit: Permit) -> None:
        self._robot, self._permit = robot, permit
        self._held_in = -1  # generation of the newest hold that was noticed
        self._brakes_until = self._braked_at = -1.0

    def brake(self, now: float) -> None:
        """Brake what moves now, or begins to within `BRAKE_SECONDS`, as a reset that was requested just before."""
        self._brakes_until = now + BRAKE_SECONDS
        self.look(now)

    def look(self, now: float) -> None:
        """Request a hold where the robot is to be braked. Call it on each poll."""
        if now < self._brakes_until and now - self._braked_at >= BRAKE_AGAIN and self._robot.moving:
            self._braked_at = now
            self._robot.request("hold")

    def newly_held(self, *, inside: bool) -> bool:
        """Return whether the robot was held since the last look; `inside` an episode it brakes before it is HELD."""
        robot = self._robot
        if not (robot.held or (inside and robot.why.startswith("held by "))):
            return False
        before, self._held_in = self._held_in, robot.shown.generation
        # Its server also holds it before it is parked.
        return before != self._held_in and not (self._permit.lasts and robot.shown.held_by == SERVER)

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
        robot, permit = self._robot, self._permit
        if permit.counts or not robot.idle:  # its state is of before
            return
        if robot.held:

            def let_go() -> None:
                resume()
                robot.request("go", shown)

            if why := _hindered(robot, shown, by_key):
                logger.warning(f"cannot go on: {why}")
            else:  # None before the server has answered
                permit.begin(now, let_go, agreed=lambda: not robot.held if robot.idle else None)
        elif robot.moving and robot.waiting:
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


def robot_obstacles(robot: RobotRequests, stopped: bool, *, clear: str, go: str) -> tuple[Obstacle, ...]:
    """Return what the state of a robot hinders; it may be `stopped` by its server, or by the operator."""
    out: tuple[Obstacle, ...] = ()
    if stopped:
        remedy = f"look at the cell, then press {clear} and {go}"
        if not robot.may_clear:
            remedy = "look at the cell; an operator's machine runs: serl-chunk robot clear"
        why = robot.why if robot.stopped else "by the operator"
        out = (Obstacle(f"the robot is STOPPED ({why})", remedy),)
    elif robot.held:
        remedy = f"look at the cell, then press {go} at the terminal or the page"
        if not robot.may_clear:
            remedy = "look at the cell; an operator's machine runs: serl-chunk robot go"
        out = (Obstacle(f"the robot is held by {robot.shown.held_by}", remedy),)
    elif robot.moving and robot.waiting:
        out = (Obstacle("the reset waits for the scene", f"arrange it, then press {go}"),)
    if robot.refused:
        out += (Obstacle(f"the robot's server refused it: {robot.refused}", "look at the robot, and press again"),)
    return out

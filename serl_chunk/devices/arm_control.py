"""Commands of one arm from the newest sample of a human's device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import numpy as np

from serl_chunk.devices.teleoperation import TwistFollower
from serl_chunk_robot.devices.base import Sample
from serl_chunk_robot.devices.neutral import APART

logger = logging.getLogger(__name__)

CLOSE, OPEN = 0, 1  # buttons of a device
GRIPPER_SECONDS = 0.6  # of a gripper's whole way, while its button is pressed
LEADER_FADES, LEADER_SPEED = 0.3, 3.0  # rad/s: of what a leader was apart, and of an arm that follows it
LEADER_ACCELERATION = 40.0  # rad/s^2 of such an arm, also on the first tick of an intervention


class ArmControl(Protocol):
    """Turns samples into an arm's part of the command."""

    dims: np.ndarray  # intp[D], of the command
    measured: np.ndarray  # intp[D], where the state has them, for an arm that a leader leads; else its joints alone

    @property
    def approaching(self) -> bool: ...

    def begin(self, last: np.ndarray, before: np.ndarray) -> None:
        """Take the arm over after the accepted commands `before` and `last`, float[A], a tick apart."""
        ...

    def command(self, sample: Sample, last: np.ndarray, state: np.ndarray) -> np.ndarray:
        """Return the arm's part of the command for the next tick, float64[D].

        Args:
            sample: of the arm's device.
            last: the last accepted command, float[A].
            state: measured, float[S].
        """
        ...


class Gripper:
    """A gripper that two buttons drive.

    Args:
        mode: "hold", it moves while a button is pressed; "press", the first button closes it and the second one opens
            it, all the way at once; "toggle", the first button closes it and opens it again.
        closed, opened: its values at both ends.
        stays: its third value, which leaves it as it is; None: it takes positions.
        dt: seconds of a tick.
    """

    def __init__(self, mode: str, closed: float, opened: float, stays: float | None, dt: float) -> None:
        self._mode, self._ends, self._stays = mode, (closed, opened), stays
        self._step = abs(opened - closed) * dt / GRIPPER_SECONDS
        self._to: float | None = None  # the end to which it is on its way
        self._pressed = False

    def begin(self) -> None:
        self._to, self._pressed = None, True  # a button that is down already counts once it was let go

    def command(self, buttons: tuple[bool, ...], last: float) -> float:
        close, opens = (*buttons, False, False)[:2]
        if self._mode == "press" and self._stays is None:
            self._to = self._ends[CLOSE] if close else self._ends[OPEN] if opens else self._to
            return last if self._to is None else self._to
        if self._mode != "toggle":
            self._to = self._ends[CLOSE] if close else self._ends[OPEN] if opens else None
        elif close and not self._pressed:
            middle = sum(self._ends) / 2
            now = last if self._to is None else self._to
            self._to = self._ends[OPEN if abs(now - self._ends[CLOSE]) < abs(middle - self._ends[CLOSE]) else CLOSE]
        self._pressed = close
        if self._stays is not None:
            return self._stays if self._to is None else self._to
        return last if self._to is None else float(np.clip(self._to, last - self._step, last + self._step))


class _TwistedArm:
    """An arm that a device with a twist moves, with or without a gripper: its index in the command, and its buttons."""

    approaching = False

    def __init__(self, dims: np.ndarray, measured: np.ndarray, gripper: tuple[int, Gripper] | None) -> None:
        self.measured, self._gripper = measured, gripper
        self.dims = np.array([*dims, *([gripper[0]] if gripper else [])], np.intp)

    def begin(self, last: np.ndarray, before: np.ndarray) -> None:
        if self._gripper:
            self._gripper[1].begin()

    def command(self, sample: Sample, last: np.ndarray, state: np.ndarray) -> np.ndarray:
        moves = self._moves(np.zeros(6) if sample.twist is None else sample.twist, last, state)
        if not self._gripper:
            return moves
        index, gripper = self._gripper
        return np.append(moves, gripper.command(sample.buttons, float(last[index])))

    def _moves(self, twist: np.ndarray, last: np.ndarray, state: np.ndarray) -> np.ndarray:
        raise NotImplementedError


class JointArm(_TwistedArm):
    """An arm that is commanded by joint targets.

    Args:
        follower: of its joints.
        measured: where the arm's joints are in the state, intp[L].
        dt: seconds of a tick.
    """

    def __init__(
        self, follower: TwistFollower, gripper: tuple[int, Gripper] | None, measured: np.ndarray, dt: float
    ) -> None:
        super().__init__(follower.joints, measured, gripper)
        self._follower, self._dt = follower, dt

    def begin(self, last: np.ndarray, before: np.ndarray) -> None:
        self._follower.begin((last - before)[self._follower.joints] / self._dt)
        super().begin(last, before)

    def _moves(self, twist: np.ndarray, last: np.ndarray, state: np.ndarray) -> np.ndarray:
        return self._follower.follow(twist, last, state[self.measured].astype(np.float64))


class TwistArm(_TwistedArm):
    """An arm that is commanded by twists itself, as HIL-SERL's: a deflection is the command.

    Args:
        axes: of x, y, z, roll, pitch, yaw, those that the arm's actions are, in their order.
        scale: of all six: the action at full deflection.
        dims: of the actions in the command.
        turn: makes a twist in the action's axes of one in the world's, float[6]; None: they are the same.
    """

    def __init__(
        self, axes: tuple[int, ...], scale: np.ndarray, dims: np.ndarray, gripper: tuple[int, Gripper] | None,
        turn: Callable[[np.ndarray], np.ndarray] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(dims, np.empty(0, np.intp), gripper)
        self._axes, self._scale, self._turn = list(axes), scale, turn

    def _moves(self, twist: np.ndarray, last: np.ndarray, state: np.ndarray) -> np.ndarray:
        twist = self._scale * twist
        return (twist if self._turn is None else np.clip(self._turn(twist), -1.0, 1.0))[self._axes]


class LeaderArm:
    """An arm that follows the joints of a leader, from where the arm is when it is taken over.

    What the leader was apart then fades out, so that no target jumps, and the leader's ends remain the arm's. Velocity
    and acceleration of the command are bounded on every tick, the first one included. It brakes in time for the leader:
    it does not overshoot one that stops.

    Args:
        dims: of the arm in the command, joints and gripper, in the leader's order.
        measured: where the state has them, intp[D].
        low, high: their limits, float[D].
        dt: seconds of a tick.
    """

    def __init__(self, dims: np.ndarray, measured: np.ndarray, low: np.ndarray, high: np.ndarray, dt: float) -> None:
        self.dims, self.measured, self._low, self._high, self._dt = dims, measured, low, high, dt
        self._apart: np.ndarray | None = None
        self._velocity = np.zeros(len(dims))

    @property
    def approaching(self) -> bool:
        """Whether the leader is still further than 0.05 rad from where the arm follows it."""
        return self._apart is not None and bool(np.abs(self._apart).max() > APART)

    def begin(self, last: np.ndarray, before: np.ndarray) -> None:
        self._apart = None
        self._velocity = np.asarray(last - before, np.float64)[self.dims] / self._dt

    def command(self, sample: Sample, last: np.ndarray, state: np.ndarray) -> np.ndarray:
        at = np.asarray(last[self.dims], np.float64)
        if sample.joints is None:  # of a leader that was lost
            self._apart = None
            return self._towards(at, at)
        if self._apart is None:
            self._apart = at - sample.joints
            if self.approaching:
                apart = float(np.abs(self._apart).max())
                logger.warning(f"leader: apart={apart:.2f} rad. Its arm comes to it at {LEADER_FADES:g} rad/s\a")
        fade = LEADER_FADES * self._dt
        self._apart = self._apart - np.clip(self._apart, -fade, fade)
        return self._towards(sample.joints + self._apart, at)

    def _towards(self, goal: np.ndarray, at: np.ndarray) -> np.ndarray:
        """Return the next command on the way to a goal, float64[D], within speed and acceleration."""
        way = np.clip(goal, np.minimum(self._low, at), np.maximum(self._high, at)) - at
        distance, change = np.abs(way), LEADER_ACCELERATION * self._dt
        # The speed from which `change` less in each tick ends at the goal: S = (k + 1) v dt - k (k + 1) / 2 change dt
        # for v from k to k + 1 times `change`.
        k = np.floor(0.5 * np.sqrt(1 + 8 * distance / (change * self._dt)) - 0.5)
        speed = np.minimum((distance / self._dt + 0.5 * k * (k + 1) * change) / (k + 1), LEADER_SPEED)
        wanted = np.copysign(speed, way)
        velocity = self._velocity + np.clip(wanted - self._velocity, -change, change)
        target = np.clip(at + velocity * self._dt, np.minimum(self._low, at), np.maximum(self._high, at))
        self._velocity = (target - at) / self._dt
        return target

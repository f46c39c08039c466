"""Joint targets that follow a twist of a human's device: damped least squares on the arms' kinematics.

Each target is computed from the last *accepted* command, so that what a safety gate took away is not made up for.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np
from scipy.optimize import lsq_linear

from serl_chunk_robot.geometry.rotations import axis_angle, rotation

LATE = 0.2  # rad by which an orientation may be late
CATCH_UP = 10.0  # 1/s: how fast it is made up for
FIRST, RELUCTANT = 30.0, 0.03  # weights of the tip's place against its turns, and of joints that need not move
TURN_SINGULAR = 0.15  # singular value of turns, in rad per rad, below which they are damped
HOMING = 0.5  # 1/s: how fast joints that move no tip return to the home pose


class Tips(Protocol):
    """Kinematics of all arms of a robot, as `serl_chunk_robot.geometry.kinematics.Arms`."""

    joints: np.ndarray  # intp[arms, L], of the command

    def tip(self, arm: int, pose: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return an arm's tip, float64[4, 4] in the world, and its Jacobian, float64[6, L], for a pose, float64[A]."""
        ...


@dataclasses.dataclass(frozen=True)
class TwistLimits:
    """How a full deflection moves a robot, and what bounds it.

    Attributes:
        translation, rotation: m/s and rad/s at full deflection.
        scale: of x, y, z, roll, pitch, yaw; 0: the tip stays still along or about that axis.
        frame: "base", axes of the world; "tool", axes of the tip.
        lead: rad by which a target may be ahead of the measured joint, so that contact winds nothing up.
        singular: singular value of the Jacobian (m per rad) below which the arm follows a direction more slowly.
        velocity: rad/s of any joint.
        acceleration: rad/s^2 of any joint, also on the first tick of an intervention.
    """

    translation: float = 0.2
    rotation: float = 1.0
    scale: tuple[float, ...] = (1.0,) * 6
    frame: str = "base"
    lead: float = 0.15
    singular: float = 0.08
    velocity: float = 2.0
    acceleration: float = 20.0


class TwistFollower:
    """Turns twists of one arm into targets of its joints.

    Args:
        tips: kinematics of the robot.
        arm: index of the arm.
        low, high: limits of the command, float[A].
        dt: seconds of a tick.
        home: pose towards which joints move that the twist leaves free, float[A]; None: they stay.
    """

    def __init__(
        self, tips: Tips, arm: int, low: np.ndarray, high: np.ndarray, dt: float, limits: TwistLimits,
        home: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        self.joints = tips.joints[arm]
        self._tips, self._arm, self._dt, self._limits, self._home = tips, arm, dt, limits, home
        self._low, self._high = low[self.joints].astype(np.float64), high[self.joints].astype(np.float64)
        self._speed = np.repeat((limits.translation, limits.rotation), 3) * limits.scale
        self._velocity = np.zeros(len(self.joints))
        self._target: np.ndarray | None = None  # of the tick before
        self._orientation: np.ndarray | None = None  # to which the tip is being turned

    def begin(self, velocity: np.ndarray) -> None:
        """Take the arm over while its targets move with `velocity`, float[L], rad/s."""
        self._velocity = np.array(velocity, np.float64)
        self._target = self._orientation = None

    def follow(self, twist: np.ndarray, accepted: np.ndarray, measured: np.ndarray) -> np.ndarray:
        """Return the targets of the arm's joints for the next tick, float64[L].

        Args:
            twist: float[6], each in [-1, 1].
            accepted: the whole last accepted command, float[A].
            measured: the arm's measured joints, float[L].
        """
        limits, pose = self._limits, np.asarray(accepted, np.float64)
        start = pose[self.joints]
        if not np.any(twist):
            start = goes_on(start, self._target, self._velocity, self._dt)
        # A joint that is further behind than `lead` is led no further, and not pulled back at once.
        ahead = np.maximum(limits.lead, np.abs(start - measured))
        low = np.maximum(measured - ahead, np.minimum(self._low, start))
        high = np.minimum(measured + ahead, np.maximum(self._high, start))
        down, up = self._stops_within(start - low), self._stops_within(high - start)
        bounds = np.maximum(-down, -limits.velocity), np.minimum(up, limits.velocity)
        change = self._joint_velocity(np.clip(twist, -1.0, 1.0) * self._speed, pose, bounds) - self._velocity
        fastest = limits.acceleration * self._dt  # of a joint that comes near an end, whatever the others do
        most = fastest / max(float(np.abs(change).max()), 1e-12)
        velocity = self._velocity + change * min(1.0, most)  # all joints alike, so that the tip keeps its direction
        velocity = np.clip(
            velocity, np.minimum(-down, self._velocity + fastest), np.maximum(up, self._velocity - fastest)
        )
        target = start + velocity * self._dt
        target = np.clip(target, np.minimum(self._low, start), np.maximum(self._high, start))
        self._velocity, self._target = (target - start) / self._dt, target
        return target

    def _stops_within(self, way: np.ndarray) -> np.ndarray:
        """Return the largest velocities from which joints stop within a way, rad, both float64[L]."""
        rate, dt = self._limits.acceleration, self._dt
        return np.asarray(rate * (np.sqrt(dt * dt + 2 * np.maximum(way, 0.0) / rate) - dt))

    def _joint_velocity(self, twist: np.ndarray, pose: np.ndarray, bounds: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        """Joint velocities, float64[L], for a tip's velocity, float64[6] in m/s and rad/s: the place first, then turns.

        Where a joint would leave `bounds`, the least and the largest velocities, float64[L] each, the others make up
        for it. Else a wrist that is slow or at its end would pull the tip aside. Turns that are late are made up for,
        up to `LATE`, while the device is deflected.
        """
        limits = self._limits
        frame, jacobian = self._tips.tip(self._arm, pose)
        turned = frame[:3, :3]
        if not twist.any():
            self._orientation = turned
            return np.zeros(len(self.joints))
        velocity, turn = (turned @ twist[:3], turned @ twist[3:]) if limits.frame == "tool" else np.split(twist, 2)
        self._orientation = rotation(turn * self._dt) @ (turned if self._orientation is None else self._orientation)
        late = axis_angle(self._orientation @ turned.T)
        if (angle := float(np.linalg.norm(late))) > LATE:
            late *= LATE / angle
            self._orientation = rotation(late) @ turned
        place, turns = jacobian[:3], jacobian[3:]
        wanted = turn + CATCH_UP * (late - turn * self._dt)
        inverse = _damped(place, limits.singular)
        alone = inverse @ velocity
        alone *= min(1.0, limits.velocity / max(float(np.abs(alone).max()), 1e-12))
        free = np.eye(len(alone)) - inverse @ place
        step = alone + free @ (_damped(turns @ free, TURN_SINGULAR) @ (wanted - turns @ alone))
        if self._home is not None:
            moving = np.linalg.pinv(jacobian, rcond=1e-3) @ jacobian
            step = step + (np.eye(len(alone)) - moving) @ (HOMING * (self._home[self.joints] - pose[self.joints]))
        low, high = bounds
        if np.all(low <= step) and np.all(step <= high):
            return np.asarray(step)
        equations = np.concatenate([FIRST * place, turns, RELUCTANT * np.eye(len(alone))])
        wished = np.concatenate([FIRST * place @ alone, wanted, RELUCTANT * np.clip(step, low, high)])
        return np.asarray(lsq_linear(equations, wished, (low - 1e-9, high + 1e-9), method="bvls").x)


def goes_on(accepted: np.ndarray, target: np.ndarray | None, velocity: np.ndarray, dt: float) -> np.ndarray:
    """Return where joints brake from, float64[L]: a set point that catches up with its target has it ahead of itself.

    A target behind the set point would let the arm turn round. What is ahead counts for one tick at most.

    Args:
        accepted: the last accepted command, float64[L].
        target: that was commanded last, float64[L]; None: nothing yet.
        velocity: of the targets, float64[L].
    """
    if target is None:
        return accepted
    most = np.abs(velocity) * dt
    return np.asarray(accepted + np.sign(velocity) * np.clip((target - accepted) * np.sign(velocity), 0.0, most))


def _damped(jacobian: np.ndarray, singular: float) -> np.ndarray:
    """An inverse whose directions with singular values below `singular`, and they alone, are damped."""
    u, s, vt = np.linalg.svd(jacobian, full_matrices=False)
    weak = np.maximum(0.0, 1.0 - (s / singular) ** 2)
    return np.asarray((vt.T * (s / (s**2 + weak * singular**2))) @ u.T)

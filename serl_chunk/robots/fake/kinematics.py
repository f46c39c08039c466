"""Closed-form kinematics of two six-joint arms that face each other over a table.

The arm is an ALOHA follower (ViperX-300: waist, shoulder, elbow, forearm roll, wrist angle, wrist rotate; metres and
radians). World frame: x to the right (from the left arm's base to the right arm's), z up, table at z = 0. Scalars and
`math` throughout: on 6 joints this is an order of magnitude faster than numpy, and the environment's speed is decided
here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

Point = tuple[float, float, float]

LEFT, RIGHT = 0, 1

# The bases stand far enough apart that an arm at full stretch reaches about 10 cm past the middle, no further.
BASE_X = (-0.65, 0.65)  # metres; the right arm is turned by pi and faces -x
SHOULDER_Z = 0.127  # shoulder axis above the table
UPPER_X, UPPER_Z = 0.05955, 0.3  # elbow from shoulder at zero pitch
FOREARM = 0.3  # elbow to wrist
HAND = 0.14  # wrist to grip point (between the fingertips)
REACH = math.hypot(UPPER_X, UPPER_Z) + FOREARM + HAND  # of the grip point from the shoulder

JOINT_LOW = (-3.14158, -1.85005, -1.76278, -3.14158, -1.8675, -3.14158)
JOINT_HIGH = (3.14158, 1.25664, 1.6057, 3.14158, 2.23402, 3.14158)

# Wrist angle that `inverse` chooses: WRIST_BEND - WRIST_UNBEND * distance of the target from the shoulder.
WRIST_BEND, WRIST_UNBEND = 2.15, 2.8  # radians, radians per metre
_UPPER = math.hypot(UPPER_X, UPPER_Z)
_UPPER_ANGLE = math.atan2(UPPER_X, UPPER_Z)  # lean of the upper arm at zero shoulder pitch
_FACING = (1.0, -1.0)  # cos of the base's yaw; its sin is 0


class ArmPose(NamedTuple):
    """Places of one arm's parts in the world frame (metres), and the hand's axes (unit vectors)."""

    shoulder: Point
    elbow: Point
    wrist: Point
    grip: Point
    forward: Point  # from wrist to grip point
    left: Point  # fingers open along this axis
    up: Point


def grip_point(arm: int, joints: Sequence[float], first: int = 0) -> Point:
    """Return the position of the grip point of `arm` for the six joints `joints[first:first + 6]`."""
    q1, q2, q4, q5 = joints[first], joints[first + 1], joints[first + 3], joints[first + 4]
    pitch = q2 + joints[first + 2]
    s2, c2 = math.sin(q2), math.cos(q2)
    sp, cp = math.sin(pitch), math.cos(pitch)
    s5 = math.sin(q5)
    along = FOREARM + HAND * math.cos(q5)
    across = HAND * s5 * math.cos(q4)
    radius = UPPER_X * c2 + UPPER_Z * s2 + along * cp - across * sp
    height = SHOULDER_Z - UPPER_X * s2 + UPPER_Z * c2 - along * sp - across * cp
    side = HAND * s5 * math.sin(q4)
    s1, c1 = math.sin(q1), math.cos(q1)
    facing = _FACING[arm]
    return BASE_X[arm] + facing * (radius * c1 - side * s1), facing * (radius * s1 + side * c1), height


def forward(arm: int, joints: Sequence[float]) -> ArmPose:
    """Return the whole pose of `arm` for its six joints (radians)."""
    q1, q2, q3, q4, q5, q6 = joints
    s2, c2 = math.sin(q2), math.cos(q2)
    sp, cp = math.sin(q2 + q3), math.cos(q2 + q3)
    s4, c4, s5, c5, s6, c6 = (f(q) for q in (q4, q5, q6) for f in (math.sin, math.cos))
    s1, c1 = math.sin(q1), math.cos(q1)
    facing = _FACING[arm]

    def world(v: Point) -> Point:
        """Turn a vector of the arm's plane (radial, sideways, up) by the waist and the base."""
        return facing * (v[0] * c1 - v[1] * s1), facing * (v[0] * s1 + v[1] * c1), v[2]

    # Axes as (radial, sideways, up); the forearm's y and z are turned by the roll.
    forearm, rolled_y, rolled_z = (cp, 0.0, -sp), (s4 * sp, c4, s4 * cp), (c4 * sp, -s4, c4 * cp)
    elbow = (UPPER_X * c2 + UPPER_Z * s2, 0.0, -UPPER_X * s2 + UPPER_Z * c2)
    wrist = plus(elbow, FOREARM, forearm)
    hand_x, hand_z = weighted(c5, forearm, -s5, rolled_z), weighted(s5, forearm, c5, rolled_z)
    left, up = weighted(c6, rolled_y, s6, hand_z), weighted(c6, hand_z, -s6, rolled_y)
    shoulder = (BASE_X[arm], 0.0, SHOULDER_Z)
    elbow_at, wrist_at, grip_at = (
        plus(shoulder, 1.0, world(place)) for place in (elbow, wrist, plus(wrist, HAND, hand_x))
    )
    return ArmPose(shoulder, elbow_at, wrist_at, grip_at, world(hand_x), world(left), world(up))


def inverse(arm: int, target: Point) -> list[float]:
    """Return six joints that bring the grip point of `arm` to `target`, without roll: a function of the target alone.

    The elbow is up, and the wrist bends less the further the target is, so that shoulder, elbow and wrist share a
    radial motion (one rate limits all). Out of reach, the arm stretches (or folds) towards the target within its
    limits.
    """
    x, y = _FACING[arm] * (target[0] - BASE_X[arm]), _FACING[arm] * target[1]
    radius, height = math.hypot(x, y), target[2] - SHOULDER_Z
    distance = math.hypot(radius, height)
    q5 = _clip(WRIST_BEND - WRIST_UNBEND * distance, 0.0, JOINT_HIGH[4])
    # Forearm and bent hand are one link from the elbow to the grip point, `tilt` below the forearm's direction.
    lower = math.sqrt(FOREARM**2 + HAND**2 + 2 * FOREARM * HAND * math.cos(q5))
    tilt = math.atan2(HAND * math.sin(q5), FOREARM + HAND * math.cos(q5))
    # Law of cosines: the angle at the shoulder between the upper arm and the line to the target, and at the elbow.
    reached = _clip(distance, abs(lower - _UPPER) + 1e-6, lower + _UPPER - 1e-6)
    at_shoulder = math.acos(_clip((_UPPER**2 + reached**2 - lower**2) / (2 * _UPPER * reached), -1.0, 1.0))
    at_elbow = math.acos(_clip((_UPPER**2 + lower**2 - reached**2) / (2 * _UPPER * lower), -1.0, 1.0))
    elevation = math.atan2(height, radius) + at_shoulder  # of the upper arm above the horizontal
    q2 = math.pi / 2 - _UPPER_ANGLE - elevation
    q3 = math.pi / 2 + _UPPER_ANGLE - at_elbow - tilt
    solution = (math.atan2(y, x), q2, q3, 0.0, q5, 0.0)
    return [_clip(q, lo, hi) for q, lo, hi in zip(solution, JOINT_LOW, JOINT_HIGH, strict=True)]


def _clip(value: float, low: float, high: float) -> float:
    return low if value < low else high if value > high else value


def weighted(a: float, u: Point, b: float, v: Point) -> Point:
    """Return a * u + b * v."""
    return a * u[0] + b * v[0], a * u[1] + b * v[1], a * u[2] + b * v[2]


def plus(point: Point, distance: float, direction: Point) -> Point:
    """Return the point `distance` (m) from `point` along `direction`."""
    return weighted(1.0, point, distance, direction)

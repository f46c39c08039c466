"""A scripted demonstrator of aloha_sim's insertion: both arms grasp from above, lift, and push peg into socket.

Peg and socket lie along x, wherever they start, and have to stay so: unlike the cube's expert this one turns forearm
and wrist so that a hand always faces straight along x, whatever the waist does. What the grasps shifted is measured
once both objects are in the air, and taken out of the last stretch.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from serl_chunk.robots.aloha_sim_arm import BASE_X, BASE_Y, GRIP, SHOULDER_Z, shoulder_and_elbow
from serl_chunk.robots.aloha_sim_plan import CLOSED, OPEN, PlannedExpert, ease

PITCH = 1.05  # rad below the horizontal, at which both hands grasp and hold
PEG_GRASP_Z, SOCKET_GRASP_Z = (
    0.012,
    0.016,
)  # m, of the grip points; the centres lie at 0.010 and 0.022, and 0.004 grinds on the table
MEET = np.array([0.0, 0.5, 0.16])  # m, between the two when they face each other
APART = 0.1  # m, of each from MEET before the last stretch: the objects' ends are 8 cm apart
PUSHED = 0.042  # m, of each from MEET at the end; the peg meets the pin at 0.05


class Pose(NamedTuple):
    """Where one hand is `tick` ticks after the start; it always faces its own side's way along x."""

    tick: int
    position: np.ndarray  # of the grip point, m
    gripper: float  # 0 closed .. 1 open


def facing_joints(position: np.ndarray, *, right: bool) -> np.ndarray:
    """Joints that bring an arm's grip point to `position` with the hand `PITCH` down and its fingers closing along y.

    The wrist's three axes meet in a point, so the first three joints place that point and the others turn the hand:
    R = Rx(forearm) Ry(wrist) Rx(hand), by its closed-form angles.

    Args:
        position: `float64[N, 3]`, m, in the world.
        right: which arm.

    Returns: `float64[N, 6]`, rad. A position out of reach gives those of the nearest reachable one on the line from
        the shoulder.
    """
    side = -1.0 if right else 1.0
    x = side * position[:, 0] + BASE_X - GRIP * np.cos(PITCH)  # of the wrist, in the base's frame
    y = side * (position[:, 1] - BASE_Y)
    height = position[:, 2] - SHOULDER_Z + GRIP * np.sin(PITCH)
    waist, reach = np.arctan2(y, x), np.hypot(x, y)
    shoulder, elbow = shoulder_and_elbow(reach, height)
    # The hand seen from the forearm: Ry(-down) Rz(-waist) Ry(PITCH); the first row and column decide the angles.
    down = shoulder + elbow
    c, s, cw, sw, cp, sp = np.cos(down), np.sin(down), np.cos(waist), np.sin(waist), np.cos(PITCH), np.sin(PITCH)
    xx = c * cw * cp + s * sp
    yx, zx = -sw * cp, s * cw * cp - c * sp
    xy, xz = c * sw, c * cw * sp - s * cp
    wrist = np.arctan2(np.hypot(yx, zx), xx)  # the branch with the wrist bent down
    return np.stack([waist, shoulder, elbow, np.arctan2(yx, -zx), wrist, np.arctan2(xy, xz)], axis=1)


class InsertionExpert(PlannedExpert):
    """Grasps peg and socket, lifts them to face each other, and pushes one into the other.

    The peg is grasped within millimetres: from a `noise` of 0.005 rad on some episodes fail, at 0.01 most do. Success
    comes at about tick 206 of 215.
    """

    def plan(self) -> np.ndarray:
        return approach(self._env.joints, self._env.object_poses)

    def replan(self, tick: int) -> np.ndarray | None:
        """The push, once both objects hang still."""
        if tick != _SETTLED:
            return None
        peg, socket = self._env.object_poses[:, :3]
        return push(peg, socket)


# Ticks at which the stretches of the approach end. The arms follow their commands late: _SETTLED lets them arrive.
_ABOVE, _DOWN, _CLOSE, _LIFTED, _FACED, _SETTLED = 40, 60, 78, 95, 135, 155
_ALIGNED, _IN = 20, 60  # the same for the push, from _SETTLED on


def approach(joints: np.ndarray, objects: np.ndarray) -> np.ndarray:
    """Commands up to facing each other, `float64[_SETTLED, 14]`, from `joints float64[14]`, `objects float64[2, 7]`."""
    commands = []
    for hand, (thing, z) in enumerate(((objects[1], SOCKET_GRASP_Z), (objects[0], PEG_GRASP_Z))):
        right = hand == 1
        around = np.array([thing[0], thing[1], z])
        above, lifted = around + _vector(z=0.09), around + _vector(z=0.08)
        faced = MEET + _vector(APART if right else -APART)
        poses = [
            Pose(_ABOVE, above, OPEN),
            Pose(_DOWN, around, OPEN),
            Pose(_CLOSE, around, CLOSED),
            Pose(_LIFTED, lifted, CLOSED),
            Pose(_FACED, faced, CLOSED),
            Pose(_SETTLED, faced, CLOSED),
        ]
        first = np.append(facing_joints(above[None], right=right)[0], OPEN)
        start = joints[7 * hand : 7 * hand + 7]
        # The first stretch is a curve in joint space: the pose it leaves is arbitrary, the air there is free.
        to_above = start + ease(_ABOVE)[:, None] * (first - start)
        commands.append(np.concatenate([to_above, _follow(poses, right=right)]))
    return np.concatenate(commands, axis=1)


def push(peg: np.ndarray, socket: np.ndarray) -> np.ndarray:
    """Commands of the last stretch, `float64[_IN, 14]`, for the centres `float64[3]` (m) that were measured before it.

    The peg's hand takes the difference of both objects across the way they move.
    """
    faced, mirrored = MEET + _vector(APART), MEET - _vector(APART)
    across = _vector(y=socket[1] - peg[1], z=socket[2] - peg[2])
    # What the hands' places miss along the way: the grips sit where they sit, the objects decide when they meet.
    along = _vector((peg[0] - socket[0]) / 2 - APART)
    aligned = faced + across
    left = [
        Pose(0, mirrored, CLOSED),
        Pose(_ALIGNED, mirrored, CLOSED),
        Pose(_IN, MEET - _vector(PUSHED) + along, CLOSED),
    ]
    right = [
        Pose(0, faced, CLOSED),
        Pose(_ALIGNED, aligned, CLOSED),
        Pose(_IN, MEET + _vector(PUSHED) + across - along, CLOSED),
    ]
    return np.concatenate([_follow(left, right=False), _follow(right, right=True)], axis=1)


def _follow(poses: list[Pose], *, right: bool) -> np.ndarray:
    """Commands of one arm from the first pose (not included) through the others, `float64[T, 7]`."""
    parts = []
    for begin, end in itertools.pairwise(poses):
        share = ease(end.tick - begin.tick)[:, None]
        position = begin.position + share * (end.position - begin.position)
        gripper = begin.gripper + share * (end.gripper - begin.gripper)
        parts.append(np.concatenate([facing_joints(position, right=right), gripper], axis=1))
    return np.concatenate(parts)


def _vector(x: float = 0.0, y: float = 0.0, z: float = 0.0) -> np.ndarray:
    return np.array([x, y, z])

"""Scripted demonstrators of aloha_sim: way-points of both grippers, turned into joints in closed form.

A ViperX whose forearm does not roll is a waist plus a planar arm, so the joints of a grip point follow from
trigonometry, and the model's position control tracks them to a few millirad. (ACT's mocap-driven simulation,
`record_sim_episodes.py`, broke with MuJoCo 3.0.)

Peg and socket of the insertion lie along x and have to stay so: that expert turns forearm and wrist so that a hand
always faces along x. It measures how the grasps shifted both objects once they are in the air, and corrects the last
stretch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from serl_chunk.robots.aloha_sim.env import AlohaSimEnv


OPEN, CLOSED = 1.0, 0.0  # a gripper
NOISE_MEMORY = 0.95  # of the noise, per tick: a time constant of 0.4 s


class PlannedExpert:
    """Plays commands per tick, `float64[T, 14]`, that a subclass plans; after the last one it is held.

    `noise` (rad, default 0) is the deviation of a smooth disturbance of every arm joint's command; the grippers stay
    clean.
    """

    def __init__(self, env: AlohaSimEnv) -> None:
        self.noise = 0.0
        self._env = env
        self._plan = np.empty((0, 14))

    def plan(self) -> np.ndarray:
        """Return the commands from the current moment on, right after a reset."""
        raise NotImplementedError

    def replan(self, tick: int) -> np.ndarray | None:
        """Return what is added to the plan at `tick`, if anything."""
        return None

    def reset(self, seed: int) -> None:
        """Plan from the current poses of arms and objects; `seed` determines the noise."""
        self._rng = np.random.default_rng(seed)
        self._disturbance = np.zeros(14)
        self._tick = 0
        self._plan = self.plan()

    def act(self) -> np.ndarray:
        """Return the command of the current tick, `float32[14]`; call once per tick, after `reset`."""
        if (more := self.replan(self._tick)) is not None:
            self._plan = np.concatenate([self._plan, more])
        command = self._plan[min(self._tick, len(self._plan) - 1)].copy()
        self._tick += 1
        fresh = self.noise * np.sqrt(1 - NOISE_MEMORY**2) * self._rng.standard_normal(14)
        self._disturbance = NOISE_MEMORY * self._disturbance + fresh
        self._disturbance[[6, 13]] = 0.0
        low, high = self._env.robot_spec.action_low, self._env.robot_spec.action_high
        return np.clip(command + self._disturbance, low, high).astype(np.float32)


def ease(ticks: int) -> np.ndarray:
    """Return shares `float64[ticks]` of a way, ending in 1, with zero velocity and acceleration at both ends."""
    s = np.arange(1, ticks + 1) / ticks
    return s**3 * (10 - 15 * s + 6 * s**2)


# Geometry of an arm (m), from gym-aloha's vx300s_{left,right}.xml.
BASE_X, BASE_Y = 0.469, 0.5  # the left arm stands at -x and looks to +x, the right arm at +x looks to -x
SHOULDER_Z = 0.079 + 0.04805
ELBOW_X, ELBOW_Z = 0.05955, 0.3  # from the shoulder, along the forearm's rest direction and up
FOREARM = 0.2 + 0.1  # elbow to wrist
GRIP = 0.069744 + 0.15  # wrist to the grip point between the finger tips


def shoulder_and_elbow(reach: np.ndarray, height: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the joints (rad, of the inputs' shape) that bring the wrist to `reach` and `height` (m) from the shoulder.

    A position out of reach gives the nearest reachable one on the line from the shoulder.
    """
    upper = np.hypot(ELBOW_X, ELBOW_Z)
    cosine = (reach**2 + height**2 - upper**2 - FOREARM**2) / (2 * upper * FOREARM)
    bend = np.arccos(np.clip(cosine, -1.0, 1.0))  # of the forearm below the upper arm's line
    lift = np.arctan2(height, reach) + np.arctan2(FOREARM * np.sin(bend), upper + FOREARM * np.cos(bend))
    rest = np.arctan2(ELBOW_Z, ELBOW_X)  # of the upper arm at joint zero
    return rest - lift, bend - rest


PITCH = 1.05  # rad below the horizontal, at which hands grasp
HANDOVER = np.array([0.0, 0.5, 0.25])  # m, where the cube changes hands


class Waypoint(NamedTuple):
    """A gripper at `tick` ticks after the plan's start; poses in between follow a smooth curve."""

    tick: int
    position: np.ndarray  # of the grip point, m, in the world
    gripper: float  # 0 closed .. 1 open
    pitch: float = PITCH  # rad below the horizontal
    roll: float = 0.0  # rad about the approach axis; 0 closes the fingers horizontally


def follow(waypoints: list[Waypoint], solve: Callable[..., np.ndarray], start: np.ndarray | None = None) -> np.ndarray:
    """Plan commands of one arm through `waypoints`, `float64[T, 7]`.

    Args:
        waypoints: the first one is where the arm is already, or is reached from `start`.
        solve: inverse kinematics, `(position float64[N, 3], pitch float64[N], roll float64[N]) -> float64[N, 6]`.
        start: measured joints, `float64[7]`. From there the arm moves on a curve in joint space: the air there is free.
    """
    parts = []
    if start is not None:
        first = waypoints[0]
        target = solve(first.position[None], np.array([first.pitch]), np.array([first.roll]))[0]
        parts.append(start + ease(first.tick)[:, None] * (np.append(target, first.gripper) - start))
    for begin, end in itertools.pairwise(waypoints):
        share = ease(end.tick - begin.tick)
        position = begin.position + share[:, None] * (end.position - begin.position)
        gripper, pitch, roll = (a + share * (b - a) for a, b in zip(begin[2:], end[2:], strict=True))
        parts.append(np.concatenate([solve(position, pitch, roll), gripper[:, None]], axis=1))
    return np.concatenate(parts)


def follow_both(
    left: list[Waypoint], right: list[Waypoint], solve: Callable[..., np.ndarray], joints: np.ndarray | None = None
) -> np.ndarray:
    """Plan commands of both arms by `follow`, `float64[T, 14]`; `joints float64[14]` are the measured ones."""
    starts = (None, None) if joints is None else (joints[:7], joints[7:])
    arms = zip((left, right), (False, True), starts, strict=True)
    return np.concatenate([follow(way, partial(solve, right=r), start) for way, r, start in arms], axis=1)


def arm_joints(position: np.ndarray, pitch: np.ndarray, roll: np.ndarray, *, right: bool) -> np.ndarray:
    """Return joints `float64[N, 6]` (rad) for a grip point at `position` `float64[N, 3]` (m), the forearm unrolled.

    The approach axis points `pitch` (`float64[N]`, rad) below the horizontal, away from the base. A position out of
    reach gives the nearest reachable one on the line from the shoulder.
    """
    side = -1.0 if right else 1.0  # the right base is turned by pi about the vertical
    ahead = side * position[:, 0] + BASE_X
    across = side * (position[:, 1] - BASE_Y)
    waist = np.arctan2(across, ahead)
    reach = np.hypot(ahead, across) - GRIP * np.cos(pitch)  # of the wrist, in the arm's plane
    height = position[:, 2] - SHOULDER_Z + GRIP * np.sin(pitch)
    shoulder, elbow = shoulder_and_elbow(reach, height)
    return np.stack([waist, shoulder, elbow, np.zeros_like(waist), pitch - shoulder - elbow, roll], axis=1)


class AlohaSimExpert(PlannedExpert):
    """Picks the cube with the right arm and hands it to the left one, open loop from the cube's true pose.

    Of the start states 0 to 49, 50 succeed at a `noise` of 0 and at 0.01 rad, 48 at 0.02 and 40 at 0.03
    (`benchmarks/robot_speed.py aloha_sim --noise`), at about tick 164 of 205.
    """

    def plan(self) -> np.ndarray:
        joints, cube = self._env.joints, self._env.object_poses[0]
        level, turned = 0.0, np.pi / 2  # the left fingers close vertically, between the right ones
        # The cube's centre is at 0.02 m once it has dropped to the table; the fingers close 5 mm below it.
        above, around = np.array([cube[0], cube[1], 0.11]), np.array([cube[0], cube[1], 0.015])
        aside = np.array([0.1, 0.0, 0.0])
        right = [
            Waypoint(45, above, OPEN),
            Waypoint(65, around, OPEN),
            Waypoint(85, around, CLOSED),
            Waypoint(130, HANDOVER, CLOSED, level),
            Waypoint(175, HANDOVER, CLOSED, level),
            Waypoint(185, HANDOVER, OPEN, level),
            Waypoint(205, HANDOVER + aside, OPEN, level),
        ]
        left = [
            Waypoint(50, HANDOVER - 1.2 * aside, OPEN, level, turned),
            Waypoint(130, HANDOVER - 1.2 * aside, OPEN, level, turned),
            Waypoint(155, HANDOVER, OPEN, level, turned),
            Waypoint(175, HANDOVER, CLOSED, level, turned),
            Waypoint(205, HANDOVER, CLOSED, level, turned),
        ]
        return follow_both(left, right, arm_joints, joints)


# m, of the grip points; the centres lie at 0.010 and 0.022, and 0.004 grinds on the table
PEG_GRASP_Z, SOCKET_GRASP_Z = 0.012, 0.016
MEET = np.array([0.0, 0.5, 0.16])  # m, between the two when they face each other
APART = 0.1  # m, of each from MEET before the last stretch: the objects' ends are 8 cm apart
PUSHED = 0.042  # m, of each from MEET at the end; the peg meets the pin at 0.05


def facing_joints(position: np.ndarray, *_: np.ndarray, right: bool) -> np.ndarray:
    """Return joints `float64[N, 6]` (rad) for a grip point at `position` `float64[N, 3]` (m), fingers closing along y.

    The hand is `PITCH` down. The wrist's three axes meet in a point, so the first three joints place that point and the
    others turn the hand: R = Rx(forearm) Ry(wrist) Rx(hand), by its closed-form angles. Out of reach: as `arm_joints`.
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
        peg, socket = self._env.object_poses
        ways = []
        for thing, z, apart in ((socket, SOCKET_GRASP_Z, -APART), (peg, PEG_GRASP_Z, APART)):
            around, faced = np.array([thing[0], thing[1], z]), MEET + _vector(apart)
            way = [
                Waypoint(_ABOVE, around + _vector(z=0.09), OPEN),
                Waypoint(_DOWN, around, OPEN),
                Waypoint(_CLOSE, around, CLOSED),
                Waypoint(_LIFTED, around + _vector(z=0.08), CLOSED),
                Waypoint(_FACED, faced, CLOSED),
                Waypoint(_SETTLED, faced, CLOSED),
            ]
            ways.append(way)
        return follow_both(ways[0], ways[1], facing_joints, self._env.joints)

    def replan(self, tick: int) -> np.ndarray | None:
        return push(*self._env.object_poses[:, :3]) if tick == _SETTLED else None


# Ticks at which the stretches of the approach end. The arms follow their commands late: _SETTLED lets them arrive.
_ABOVE, _DOWN, _CLOSE, _LIFTED, _FACED, _SETTLED = 40, 60, 78, 95, 135, 155
_ALIGNED, _IN = 20, 60  # the same for the push, from _SETTLED on


def push(peg: np.ndarray, socket: np.ndarray) -> np.ndarray:
    """Plan the last stretch, `float64[_IN, 14]`, from both centres `float64[3]` (m) as measured before it."""
    faced, mirrored = MEET + _vector(APART), MEET - _vector(APART)
    # The peg's hand compensates the difference of both objects across the way they move.
    across = _vector(y=socket[1] - peg[1], z=socket[2] - peg[2])
    # Offset of the grips along the way: the objects decide when they meet.
    along = _vector((peg[0] - socket[0]) / 2 - APART)
    left = [
        Waypoint(0, mirrored, CLOSED),
        Waypoint(_ALIGNED, mirrored, CLOSED),
        Waypoint(_IN, MEET - _vector(PUSHED) + along, CLOSED),
    ]
    right = [
        Waypoint(0, faced, CLOSED),
        Waypoint(_ALIGNED, faced + across, CLOSED),
        Waypoint(_IN, MEET + _vector(PUSHED) + across - along, CLOSED),
    ]
    return follow_both(left, right, facing_joints)


def _vector(x: float = 0.0, y: float = 0.0, z: float = 0.0) -> np.ndarray:
    return np.array([x, y, z])

"""A scripted demonstrator of aloha_sim: way-points of both grippers, turned into joints in closed form.

The usual recipe (ACT's `record_sim_episodes.py`) rolls out a second, mocap-driven simulation and replays its joints;
that simulation broke with MuJoCo 3.0. A ViperX whose forearm does not roll is a waist plus a planar arm, so the
joints of a grip point follow from trigonometry, and the model's position control tracks them to a few millirad.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from serl_chunk.robots.aloha_sim_arm import BASE_X, BASE_Y, GRIP, SHOULDER_Z, shoulder_and_elbow
from serl_chunk.robots.aloha_sim_plan import CLOSED, OPEN, PlannedExpert, ease

HANDOVER = np.array([0.0, 0.5, 0.25])  # m, where the cube changes hands


class Waypoint(NamedTuple):
    """Where a gripper is at `tick` after the plan's start; poses in between follow a smooth curve."""

    tick: int
    position: np.ndarray  # of the grip point, m, in the world
    pitch: float  # rad below the horizontal
    roll: float  # rad about the approach axis; 0 closes the fingers horizontally
    gripper: float  # 0 closed .. 1 open


def arm_joints(position: np.ndarray, pitch: np.ndarray, roll: np.ndarray, *, right: bool) -> np.ndarray:
    """Joints that bring an arm's grip point to `position` with the forearm unrolled.

    Args:
        position: `float64[N, 3]`, m, in the world.
        pitch, roll: `float64[N]`, rad; the approach axis points `pitch` below the horizontal, away from the base.
        right: which arm.

    Returns: `float64[N, 6]`, rad. A position out of reach gives the joints of the nearest reachable one along the
        line from the shoulder.
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
    (`benchmarks/aloha_sim_speed.py --noise`). Success comes at about tick 164 of 205.
    """

    def plan(self) -> np.ndarray:
        return plan(self._env.joints, self._env.cube_pose[:3])


def plan(joints: np.ndarray, cube: np.ndarray) -> np.ndarray:
    """Commands per tick, `float64[T, 14]`, from the measured `joints float64[14]` and the cube's position (m)."""
    down, level = 1.05, 0.0
    # The cube's centre is at 0.02 m once it has dropped to the table; the fingers close 5 mm below it.
    above, around = np.array([cube[0], cube[1], 0.11]), np.array([cube[0], cube[1], 0.015])
    aside = np.array([0.1, 0.0, 0.0])
    right = [
        Waypoint(45, above, down, 0.0, OPEN),
        Waypoint(65, around, down, 0.0, OPEN),
        Waypoint(85, around, down, 0.0, CLOSED),
        Waypoint(130, HANDOVER, level, 0.0, CLOSED),
        Waypoint(175, HANDOVER, level, 0.0, CLOSED),
        Waypoint(185, HANDOVER, level, 0.0, OPEN),
        Waypoint(205, HANDOVER + aside, level, 0.0, OPEN),
    ]
    turned = np.pi / 2  # the left fingers close vertically, between the right ones
    left = [
        Waypoint(50, HANDOVER - 1.2 * aside, level, turned, OPEN),
        Waypoint(130, HANDOVER - 1.2 * aside, level, turned, OPEN),
        Waypoint(155, HANDOVER, level, turned, OPEN),
        Waypoint(175, HANDOVER, level, turned, CLOSED),
        Waypoint(205, HANDOVER, level, turned, CLOSED),
    ]
    return np.concatenate([_follow(joints[:7], left, right=False), _follow(joints[7:], right, right=True)], axis=1)


def _follow(start: np.ndarray, waypoints: list[Waypoint], *, right: bool) -> np.ndarray:
    """Commands of one arm, `float64[T, 7]`: from the joints `start float64[7]` through `waypoints`."""
    first = waypoints[0]
    target = arm_joints(first.position[None], np.array([first.pitch]), np.array([first.roll]), right=right)[0]
    # The first stretch is a curve in joint space: the pose it leaves is arbitrary, the air there is free.
    share = ease(first.tick)[:, None]
    goal = np.append(target, first.gripper)
    parts = [start + share * (goal - start)]
    for begin, end in itertools.pairwise(waypoints):
        share = ease(end.tick - begin.tick)
        position = begin.position + share[:, None] * (end.position - begin.position)
        pitch = begin.pitch + share * (end.pitch - begin.pitch)
        roll = begin.roll + share * (end.roll - begin.roll)
        gripper = begin.gripper + share * (end.gripper - begin.gripper)
        parts.append(np.concatenate([arm_joints(position, pitch, roll, right=right), gripper[:, None]], axis=1))
    return np.concatenate(parts)

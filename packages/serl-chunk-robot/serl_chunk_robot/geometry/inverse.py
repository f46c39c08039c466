"""Joints for a pose of an arm's tip: damped least squares on the chains of `kinematics`, the position first.

Few iterations, for they run in the thread of the control loop while the robot stands.
"""

from __future__ import annotations

from typing import Optional

import numpy as np

from serl_chunk_robot.geometry.kinematics import Arms
from serl_chunk_robot.geometry.rotations import matrix_of_euler

ITERATIONS = 60
NEAR, TURNED = 1e-5, 1e-4  # m and rad: what counts as there
DAMPING = 1e-3  # m per rad, squared in the least squares; more where the tip is far away
LEVER = 0.2  # m, that a turn of 1 rad counts for
STEP = 0.3  # rad, of a joint in an iteration
NODES = 8  # places of a straight way of the tip that are solved for, in addition to its start
STRAIGHT = 0.01  # m, from the line in between


def pose_frame(pose: np.ndarray) -> np.ndarray:
    """The frame, float64[4, 4], of x, y, z (m) and turns about the world's x, y and z (rad), in this order."""
    frame = np.eye(4)
    frame[:3, :3], frame[:3, 3] = matrix_of_euler(pose[3:]), pose[:3]
    return frame


def reach(
    arms: Arms, arm: int, start: np.ndarray, frame: np.ndarray, low: np.ndarray, high: np.ndarray, *, turned: bool
) -> Optional[np.ndarray]:
    """Joints, float64[J], near `start` that bring the tip of an arm to a frame; None where none were found.

    Args:
        turned: the orientation is to be that of the frame; False: as near to it as the position lets it be.
    """
    pose, joints = np.minimum(np.maximum(start, low), high), arms.joints[arm]
    best, least = None, np.inf
    for _ in range(ITERATIONS):
        at, jacobian = arms.tip(arm, pose)
        away, turn = frame[:3, 3] - at[:3, 3], _turn(frame[:3, :3] @ at[:3, :3].T)
        angle = float(np.linalg.norm(turn))
        if np.linalg.norm(away) < NEAR:
            if angle < TURNED:
                return pose
            if not turned and angle > 0.999 * least:  # the orientation gets no better
                break
            best, least = pose, angle
        q, moves = pose[joints], np.ones(len(joints))
        for _ in range(len(joints)):  # joints at a limit, which the others are to make up for
            step = _step(jacobian * moves, away, turn, turned)
            stuck = ((q <= low[joints]) & (step < 0)) | ((q >= high[joints]) & (step > 0))
            if not (stuck & (moves > 0)).any():
                break
            moves = np.where(stuck, 0.0, moves)
        pose = pose.copy()
        pose[joints] += step * min(1.0, STEP / max(float(np.abs(step).max()), 1e-12))
        pose = np.minimum(np.maximum(pose, low), high)
    return None if turned else best


def lifted(
    arms: Arms, arm: int, start: np.ndarray, height: float, low: np.ndarray, high: np.ndarray
) -> Optional[np.ndarray]:
    """Places of a way that lifts an arm's tip straight up by `height`, m, and keeps its orientation as far as it can.

    Returns:
        float64[NODES + 1, J] at equal heights, the first of which is `start`; None where the tip cannot get there.
    """
    frame = arms.tip(arm, start)[0]
    way = [start]
    for k in range(1, NODES + 1):
        to = frame.copy()
        to[2, 3] += height * k / NODES
        place = reach(arms, arm, way[-1], to, low, high, turned=False)
        if place is None:
            return None
        way.append(place)
    points = arms(along(polynomial(np.stack(way)), np.linspace(0, 1, 4 * NODES + 1)))[arm, :, -1]
    aside = np.linalg.norm(points[:, :2] - frame[:2, 3], axis=1)
    return np.stack(way) if aside.max() <= STRAIGHT else None


def polynomial(nodes: np.ndarray) -> np.ndarray:
    """Coefficients, float64[K, J], of the polynomial through K evenly spaced nodes, float64[K, J]: see `along`."""
    return np.linalg.solve(np.vander(np.linspace(0, 1, len(nodes)), increasing=True), nodes)


def along(coefficients: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Points of the polynomial at N shares of the way, float64[N, J]."""
    return np.asarray(np.vander(shares, len(coefficients), increasing=True) @ coefficients)


def _step(jacobian: np.ndarray, away: np.ndarray, turn: np.ndarray, turned: bool) -> np.ndarray:
    """Turns of the joints, float64[L], towards a frame: with its orientation, or the position first."""
    if turned:
        scale = np.array([1, 1, 1, LEVER, LEVER, LEVER])
        error = scale * np.concatenate([away, turn])
        return _damped(scale[:, None] * jacobian, DAMPING + 0.1 * float(np.linalg.norm(error))) @ error
    moves, turns = jacobian[:3], jacobian[3:]
    inverse = _damped(moves, DAMPING)
    first = inverse @ away
    free = np.eye(jacobian.shape[1]) - inverse @ moves  # what moves the tip nowhere
    return np.asarray(first + free @ _damped(turns @ free, 0.1) @ (turn - turns @ first))


def _damped(jacobian: np.ndarray, damping: float) -> np.ndarray:
    return np.asarray(jacobian.T @ np.linalg.inv(jacobian @ jacobian.T + damping**2 * np.eye(len(jacobian))))


def _turn(rotation: np.ndarray) -> np.ndarray:
    """The axis of a rotation, float64[3], as long as its angle, rad."""
    w = np.array([rotation[2, 1] - rotation[1, 2], rotation[0, 2] - rotation[2, 0], rotation[1, 0] - rotation[0, 1]])
    sine = float(np.linalg.norm(w))
    return w * (np.arctan2(sine, np.trace(rotation) - 1) / sine) if sine > 1e-12 else np.zeros(3)

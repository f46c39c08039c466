"""Where the points of arms are, of chains of hinges, for many poses at once; and joints for a pose of an arm's tip.

The latter are damped least squares, the position first, in few iterations: they run in the thread of the control loop
while the robot stands.
"""

from __future__ import annotations

from typing import NamedTuple, Optional, Sequence, Tuple

import numpy as np

from serl_chunk_robot.geometry.rotations import axis_angle, matrix_of_euler

ITERATIONS = 60
NEAR, TURNED = 1e-5, 1e-4  # m and rad: what counts as there
DAMPING = 1e-3  # m per rad, squared in the least squares; more where the tip is far away
LEVER = 0.2  # m, that a turn of 1 rad counts for
STEP = 0.3  # rad, of a joint in an iteration
NODES = 8  # places of a straight way of the tip that are solved for, in addition to its start
STRAIGHT = 0.01  # m, from the line in between


class Link(NamedTuple):
    """A hinge: its place and orientation in its parent's frame, and the axis that it turns about in its own."""

    offset: Tuple[float, float, float]  # m
    axis: Tuple[float, float, float]  # of length 1


class Chain:
    """One arm.

    Args:
        base: position in the world, m.
        yaw: of the base about the world's z, rad.
        links: from the base outwards.
        tip: of the last link's frame, m.
    """

    def __init__(self, base: Sequence[float], yaw: float, links: Sequence[Link], tip: Sequence[float]) -> None:
        count = len(links)
        if not count or not all(abs(np.linalg.norm(link.axis) - 1) < 1e-6 for link in links):
            raise ValueError("a chain needs links, and their axes are of length 1")
        c, s = np.cos(yaw), np.sin(yaw)
        self.base = np.array([[c, -s, 0, base[0]], [s, c, 0, base[1]], [0, 0, 1, base[2]], [0, 0, 0, 1]], np.float64)
        self.tip = np.array([*tip, 1.0])
        # Rodrigues: R = I + sin K + (1 - cos) K^2, next to the offset, which does not turn.
        self.still = np.tile(np.eye(4), (count, 1, 1))
        self.still[:, :3, 3] = [link.offset for link in links]
        self.k = np.zeros((count, 4, 4))
        self.k[:, :3, :3] = [[[0, -z, y], [z, 0, -x], [-y, x, 0]] for x, y, z in (link.axis for link in links)]
        lengths = [np.linalg.norm(link.offset) for link in links[1:]] + [np.linalg.norm(tip)]
        self.levers = np.cumsum(lengths[::-1])[::-1]  # float64[L], m: the farthest that a point is from each hinge


class Arms:
    """The chains of all arms, each with as many links as the others. `arms(poses)` are their points in the world.

    Args:
        chains: one for each arm.
        joints: of each chain, where its joints are in a pose, as many as it has links.
        size: joints of a pose; some may move no point, as a gripper's.
        home: pose towards which joints of an arm of more than six move where a human's device leaves them free;
            default: the middle of their ranges.
    """

    def __init__(
        self, chains: Sequence[Chain], joints: Sequence[Sequence[int]], size: int,
        home: Optional[Sequence[float]] = None,
    ) -> None:  # fmt: skip
        counts = {len(chain.still) for chain in chains} | {len(indices) for indices in joints}
        if len(counts) != 1 or len(chains) != len(joints):
            raise ValueError("each chain needs as many links as the others, and as many joints")
        if home is not None and len(home) != size:
            raise ValueError(f"home has {len(home)} numbers, expected {size}")
        self.joints = np.array(joints, np.intp)  # [A, L]
        self.home = None if home is None else np.array(home, np.float64)
        self.levers = np.zeros(size)  # m: the farthest that a joint's turn of 1 rad moves a point
        for chain, indices in zip(chains, self.joints):
            self.levers[indices] = np.maximum(self.levers[indices], chain.levers)
        self._base = np.stack([chain.base for chain in chains])[:, None]
        self._still = np.stack([chain.still + chain.k @ chain.k for chain in chains])[:, :, None]
        self._k = np.stack([chain.k for chain in chains])[:, :, None]
        self._k2 = self._k @ self._k
        self._tip = np.stack([chain.tip for chain in chains])[:, None, :, None]

    def __call__(self, poses: np.ndarray) -> np.ndarray:
        """float64[A, N, L + 1, 3], m, of poses float64[N, J], rad: the origins of an arm's links, and its tip."""
        q = poses.T[self.joints][..., None, None]  # [A, L, N, 1, 1]
        turns = self._still + np.sin(q) * self._k - np.cos(q) * self._k2
        arms, links, count = turns.shape[:3]
        points = np.empty((arms, count, links + 1, 3))
        frame = self._base
        for i in range(links):
            frame = frame @ turns[:, i]
            points[:, :, i] = frame[..., :3, 3]
        points[:, :, links] = (frame @ self._tip)[..., :3, 0]
        return points

    def tip(self, arm: int, pose: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
        """The frame of an arm's tip in the world, float64[4, 4], and its Jacobian, float64[6, L]: m and rad per rad.

        Its axes are those of the last link. `pose`: float64[J].
        """
        frame, origins, axes = self._base[arm, 0], [], []
        for i, q in enumerate(pose[self.joints[arm]]):
            k = self._k[arm, i, 0]
            frame = frame @ (self._still[arm, i, 0] + np.sin(q) * k - np.cos(q) * self._k2[arm, i, 0])
            origins.append(frame[:3, 3])
            axes.append(frame[:3, :3] @ (k[2, 1], k[0, 2], k[1, 0]))
        tip = frame.copy()
        tip[:3, 3] = (frame @ self._tip[arm, 0])[:3, 0]
        jacobian = np.concatenate([np.cross(axes, tip[:3, 3] - np.array(origins)), axes], axis=1)
        return tip, jacobian.T


def pose_frame(pose: np.ndarray) -> np.ndarray:
    """The frame, float64[4, 4], of x, y, z (m) and turns about the world's x, y and z (rad), in this order."""
    frame = np.eye(4)
    frame[:3, :3], frame[:3, 3] = matrix_of_euler(pose[3:]), pose[:3]
    return frame


def reach(
    arms: Arms, arm: int, start: np.ndarray, frame: np.ndarray, low: np.ndarray, high: np.ndarray, *, turned: bool
) -> Optional[np.ndarray]:
    """Joints, float64[J], near `start` that bring the tip of an arm to a frame; None where none were found.

    `turned`: the orientation is to be that of the frame; False: as near to it as the position lets it be.
    """
    pose, joints = np.minimum(np.maximum(start, low), high), arms.joints[arm]
    best, least = None, np.inf
    for _ in range(ITERATIONS):
        at, jacobian = arms.tip(arm, pose)
        away, turn = frame[:3, 3] - at[:3, 3], axis_angle(frame[:3, :3] @ at[:3, :3].T)
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

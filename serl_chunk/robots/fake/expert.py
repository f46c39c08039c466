"""The scripted demonstrator: decides from the environment's state alone, so it can begin anywhere."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from serl_chunk.robots.fake import spec as task
from serl_chunk.robots.fake.kinematics import LEFT, RIGHT, Point, inverse

if TYPE_CHECKING:
    from serl_chunk.robots.fake.env import FakeAlohaEnv

HAND_OVER: Point = (0.02, 0.0, 0.11)  # where the right arm presents the cube
READY: tuple[Point, Point] = ((-0.07, 0.0, 0.12), task.HOME_GRIP[RIGHT])  # where an arm without work waits

_CLOSE_WITHIN = 0.015  # metres between grip point and cube at which fingers start to close
_KEEP_CLOSING_WITHIN = 0.022  # the same once they have started: a start-stop at the edge would never end
_PRESENTED_WITHIN = 0.05  # metres between cube and HAND_OVER at which the left arm fetches it
_RELEASE_WITHIN = 0.02  # metres between cube and place at which the left arm opens
_CLEARANCE = 0.08  # metres above the cube at which an arm approaches from afar
_OPEN, _CLOSED = 1.0, 0.0
_NOISE_MEMORY = 0.8  # AR(1) coefficient per tick of the hand's noise


def fetching_arm(cube_x: float) -> int:
    """Return the arm that fetches a cube on the table at `cube_x` metres."""
    return RIGHT if cube_x >= 0.0 else LEFT


class ScriptedExpert:
    """Pick, hand over, place; re-opens after a missed grasp and fetches a dropped cube with the nearer arm.

    Every command is the measured joints, a step of at most `speed` times the rate limits towards the goal, and smooth
    noise, which is all that it keeps between calls.

    Args:
        speed: the least and the most, from which `reset` draws the share of the joint rate limit used.
        noise: standard deviation of the noise on every joint, radians.
    """

    def __init__(self, env: FakeAlohaEnv, *, speed: tuple[float, ...] = (0.7, 1.0), noise: float = 0.01) -> None:
        self._env = env
        self._speed_range = speed
        self._noise_scale = noise * math.sqrt(1.0 - _NOISE_MEMORY**2)  # stationary standard deviation = noise
        self.reset(0)

    def reset(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._speed = float(self._rng.uniform(self._speed_range[0], self._speed_range[1]))
        self._noise = [0.0] * task.ACTION_DIM

    def act(self) -> np.ndarray:
        """Return the command for the current tick, `float32[14]`, inside the joint limits."""
        joints = self._env.joints
        fresh = self._rng.standard_normal(task.ACTION_DIM).tolist()
        self._noise = [_NOISE_MEMORY * n + self._noise_scale * e for n, e in zip(self._noise, fresh, strict=True)]
        command: list[float] = []
        for arm, (target, opening) in zip((LEFT, RIGHT), self.goals(), strict=True):
            first = arm * task.ARM_DIM
            now = joints[first : first + task.ARM_DIM]
            errors = [g - q for g, q in zip(inverse(arm, target), now[:6], strict=True)]
            # One factor for all six joints: the arm moves on a straight line in joint space.
            scale = min(1.0, self._speed * task.JOINT_RATE / max(1e-9, *map(abs, errors)))
            command += [q + scale * e + n for q, e, n in zip(now[:6], errors, self._noise[first:], strict=False)]
            step = self._speed * task.GRIPPER_RATE
            command.append(now[6] + min(max(opening - now[6], -step), step))
        return np.clip(command, task.ACTION_LOW, task.ACTION_HIGH).astype(np.float32)

    def goals(self) -> tuple[tuple[Point, float], tuple[Point, float]]:
        """Return the grip point to go to, m, and the gripper's opening, of the left and of the right arm."""
        env = self._env
        wait_left, wait_right = (READY[LEFT], _OPEN), (READY[RIGHT], _OPEN)
        if env.holder == LEFT:
            return self._place_cube(), wait_right
        if env.holder == RIGHT:
            presented = math.dist(env.cube, HAND_OVER) < _PRESENTED_WITHIN
            present = self._carry(RIGHT, HAND_OVER), _CLOSED
            return (self._grasp(LEFT, env.cube) if presented else wait_left), present
        if fetching_arm(env.cube[0]) == LEFT:
            return self._grasp(LEFT, self._above_cube(LEFT)), wait_right
        return wait_left, self._grasp(RIGHT, self._above_cube(RIGHT))

    def _grasp(self, arm: int, target: Point) -> tuple[Point, float]:
        """Go to `target` and close on the cube; fingers that closed without it open again first."""
        env = self._env
        opening = env.joints[task.GRIPPER[arm]]
        within = _CLOSE_WITHIN if opening > 0.95 * _OPEN else _KEEP_CLOSING_WITHIN
        close = opening > task.FINGERS_CLOSED and math.dist(env.grips[arm], env.cube) < within
        return target, _CLOSED if close else _OPEN

    def _above_cube(self, arm: int) -> Point:
        """A point that sinks onto the cube as the hand comes nearer, so that the fingers arrive from above."""
        (x, y, z), grip = self._env.cube, self._env.grips[arm]
        far = math.hypot(grip[0] - x, grip[1] - y)
        return x, y, z + min(max(far - 0.02, 0.0), _CLEARANCE)

    def _carry(self, arm: int, goal: Point) -> Point:
        """The grip point that brings the held cube, wherever it sits between the fingers, to `goal`."""
        grip, cube = self._env.grips[arm], self._env.cube
        return goal[0] + grip[0] - cube[0], goal[1] + grip[1] - cube[1], goal[2] + grip[2] - cube[2]

    def _place_cube(self) -> tuple[Point, float]:
        """Carry the cube to its place and release it there, once the right arm's fingers are out of the way."""
        env = self._env
        if env.joints[task.GRIPPER[RIGHT]] <= task.FINGERS_CLOSED and math.dist(env.grips[RIGHT], env.cube) < 0.05:
            return env.grips[LEFT], _CLOSED
        there = math.dist(env.cube, task.PLACE) < _RELEASE_WITHIN
        return self._carry(LEFT, task.PLACE), _OPEN if there else _CLOSED

"""The fake single arm's scripted demonstrator and scripted human; both decide from the environment's state alone."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from serl_chunk.config.robots import ScriptedHumanConfig
from serl_chunk.robots.fake import single_arm_spec as task
from serl_chunk.robots.fake.scripted_human import InterveningHuman

if TYPE_CHECKING:
    from serl_chunk.robots.fake.single_arm_env import FakeSingleArmEnv

STALL_TICKS = 8  # without a rise of the progress measure before the human reacts; 0.8 s at 10 Hz
_HUMAN = ScriptedHumanConfig(stall_ticks=STALL_TICKS, correction_ticks=(5, 15), speed=(0.5, 0.8), noise=0.1)

_HOVER = 0.1  # m above the block at which the hand comes from afar
_AROUND = 0.03  # m next to the block at which it may go down
_CLOSE_WITHIN = 0.008  # m from the block's centre at which the fingers close
_ALIGNED = 0.15  # rad
_RELEASE_WITHIN = 0.015  # m from the place
_CARRY_Z = 0.1  # m, of the block while it is carried
_NOISE_MEMORY = 0.6  # AR(1) coefficient per tick of the hand's noise


class SingleArmExpert:
    """Goes above the block, turns to it, grasps, carries, places; opens again after a missed grasp.

    Between calls it keeps nothing but its noise: it can begin anywhere.

    Args:
        env: the environment to act in; read, never changed.
        speed: range from which `reset` draws the share of full speed used.
        noise: standard deviation of smooth noise on the six velocities, in units of full speed.
    """

    def __init__(self, env: FakeSingleArmEnv, *, speed: tuple[float, ...] = (0.7, 1.0), noise: float = 0.05) -> None:
        self._env, self._speed_range, self.noise = env, speed, noise
        self.reset(0)

    def reset(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._speed = float(self._rng.uniform(self._speed_range[0], self._speed_range[1]))
        self._disturbance = np.zeros(6)

    def act(self) -> np.ndarray:
        """Return the command for the current tick, `float32[7]` in [-1, 1]."""
        env = self._env
        fresh = self.noise * math.sqrt(1 - _NOISE_MEMORY**2) * self._rng.standard_normal(6)
        self._disturbance = _NOISE_MEMORY * self._disturbance + fresh
        target, opening = self._goal()
        linear = (target - env.position) / (task.LINEAR_SPEED * env.robot_spec.dt)
        # Upright: the turn that brings the forward axis down, and the yaw to the block's (free hands only).
        upright = np.cross(env.rotation[:, 2], (0.0, 0.0, -1.0))
        turn = np.array([0.0, 0.0, 0.0 if env.held else env.misalignment])
        angular = (upright + turn) / (task.ANGULAR_SPEED * env.robot_spec.dt)
        # One factor for each velocity: the hand moves on a straight line.
        linear *= min(1.0, self._speed / max(1e-9, float(np.linalg.norm(linear))))
        angular *= min(1.0, self._speed / max(1e-9, float(np.linalg.norm(angular))))
        moving = np.concatenate([linear, angular]) + self._disturbance
        return np.clip(np.append(moving, opening), -1.0, 1.0).astype(np.float32)

    def _goal(self) -> tuple[np.ndarray, float]:
        """Where the grip point should go (m), and the fingers' velocity."""
        env = self._env
        place = np.array(task.PLACE)
        if env.held:
            offset = env.position - env.block
            if np.linalg.norm(env.block - place) < _RELEASE_WITHIN:
                return env.position, 1.0
            if np.linalg.norm((env.block - place)[:2]) > _AROUND:  # up first, then across
                lifted = env.block[2] > _CARRY_Z / 2
                goal = np.append(place[:2] if lifted else env.block[:2], _CARRY_Z)
                return goal + offset, -1.0
            return place + offset, -1.0
        distance = np.linalg.norm(env.position - env.block)
        if env.opening < 0.95 and distance > 2 * _CLOSE_WITHIN:
            return env.block + np.array([0.0, 0.0, _HOVER / 2]), 1.0  # a missed grasp, or a fist
        if distance < _CLOSE_WITHIN and abs(env.misalignment) < _ALIGNED:
            return env.block, -1.0
        if env.opening < 0.95:  # has begun to close
            missed = env.opening <= task.FINGERS_CLOSED
            return env.block, 1.0 if missed else -1.0
        down = np.linalg.norm((env.position - env.block)[:2]) < _AROUND and abs(env.misalignment) < _ALIGNED
        return (env.block if down else env.block + np.array([0.0, 0.0, _HOVER])), 1.0


def progress(env: FakeSingleArmEnv) -> float:
    """Measure progress: 0-1 reaching and turning, 1-2 placing."""
    if env.held:
        return 2.0 - min(float(np.linalg.norm(env.block - task.PLACE)) / 0.6, 1.0)
    near = 1.0 - min(float(np.linalg.norm(env.block - env.position)) / 0.6, 1.0)
    return 0.7 * near + 0.2 * (1.0 - abs(env.misalignment) / (math.pi / 2))


class SingleArmHuman(InterveningHuman):
    """Intervenes after a stall, slower and noisier than the demonstrator, until its time is up."""

    def __init__(self, env: FakeSingleArmEnv) -> None:
        super().__init__(env, _HUMAN, SingleArmExpert(env, speed=_HUMAN.speed, noise=_HUMAN.noise))

    def _watch(self) -> None:
        self._best, self._since_rise = progress(self._env), 0

    def _needed(self) -> bool:
        now = progress(self._env)
        if now > self._best + 0.005 or now < self._best - 0.5:  # better, or dropped: measured from here
            self._best, self._since_rise = now, 0
            return False
        self._since_rise += 1
        return self._since_rise >= self._config.stall_ticks

    def _standstill(self) -> np.ndarray:
        return np.zeros(task.ACTION_DIM, np.float32)

"""The fake single arm's scripted demonstrator and scripted human; both decide from the environment's state alone."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from serl_chunk.robots.base import InterventionCommand
from serl_chunk.robots.fake import single_arm_spec as task
from serl_chunk.types import Observation

if TYPE_CHECKING:
    from serl_chunk.robots.fake.single_arm_env import FakeSingleArmEnv

STALL_TICKS = 8  # without a rise of the progress measure before the human reacts; 0.8 s at 10 Hz
CORRECTION_TICKS = (5, 15)  # both included

_HOVER = 0.1  # m above the block at which the hand comes from afar
_AROUND = 0.03  # m beside the block at which it may go down
_CLOSE_WITHIN = 0.008  # m from the block's centre at which the fingers close
_ALIGNED = 0.15  # rad
_RELEASE_WITHIN = 0.015  # m from the place
_CARRY_Z = 0.1  # m, of the block while it is carried
_NOISE_MEMORY = 0.6  # AR(1) coefficient per tick of the hand's noise


class SingleArmExpert:
    """Goes above the block, turns to it, grasps, carries, places; opens again after a missed grasp.

    Between calls it keeps nothing but its noise: it can take over anywhere.

    Args:
        env: the environment to act in; read, never changed.
        speed: range from which `reset` draws the share of full speed used.
        noise: standard deviation of smooth noise on the six velocities, in units of full speed.
    """

    def __init__(self, env: FakeSingleArmEnv, *, speed: tuple[float, float] = (0.7, 1.0), noise: float = 0.05) -> None:
        self._env, self._speed_range, self.noise = env, speed, noise
        self.reset(0)

    def reset(self, seed: int) -> None:
        """Draw this episode's speed and start its noise afresh."""
        self._rng = np.random.default_rng(seed)
        self._speed = float(self._rng.uniform(*self._speed_range))
        self._disturbance = np.zeros(6)

    def act(self) -> np.ndarray:
        """The command for the present tick, `float32[7]` in [-1, 1]."""
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
            beside = float(np.linalg.norm((env.block - place)[:2]))
            if np.linalg.norm(env.block - place) < _RELEASE_WITHIN:
                return env.position, 1.0
            if beside > _AROUND:  # up first, then across
                lifted = env.block[2] > _CARRY_Z / 2
                goal = np.append(place[:2] if lifted else env.block[:2], _CARRY_Z)
                return goal + offset, -1.0
            return place + offset, -1.0
        beside = float(np.linalg.norm((env.position - env.block)[:2]))
        if env.opening < 0.95 and np.linalg.norm(env.position - env.block) > 2 * _CLOSE_WITHIN:
            return env.block + np.array([0.0, 0.0, _HOVER / 2]), 1.0  # a missed grasp, or a fist
        if np.linalg.norm(env.position - env.block) < _CLOSE_WITHIN and abs(env.misalignment) < _ALIGNED:
            return env.block, -1.0
        if env.opening < 0.95:  # has begun to close
            missed = env.opening <= task.FINGERS_CLOSED
            return env.block, 1.0 if missed else -1.0
        down = beside < _AROUND and abs(env.misalignment) < _ALIGNED
        return (env.block if down else env.block + np.array([0.0, 0.0, _HOVER])), 1.0


def progress(env: FakeSingleArmEnv) -> float:
    """How far the task is: 0-1 reaching and turning, 1-2 placing."""
    if env.held:
        return 2.0 - min(float(np.linalg.norm(env.block - task.PLACE)) / 0.6, 1.0)
    near = 1.0 - min(float(np.linalg.norm(env.block - env.position)) / 0.6, 1.0)
    return 0.7 * near + 0.2 * (1.0 - abs(env.misalignment) / (math.pi / 2))


class SingleArmHuman:
    """Intervenes after a stall, corrects for a while, then keeps still until the policy decides.

    Human faults are part of it: slower and noisier than the demonstrator, and done when the time is up rather
    than when the problem is.
    """

    def __init__(self, env: FakeSingleArmEnv) -> None:
        self._env = env
        self._hands = SingleArmExpert(env, speed=(0.5, 0.8), noise=0.1)
        self.reset(0)

    def reset(self, seed: int) -> None:
        """Watch a new episode; everything the human does follows from `seed` and the environment."""
        self._rng = np.random.default_rng(seed)
        self._correcting = 0
        self._in_control = False
        self._best: float = 0.0
        self._since_rise = 0
        self._watch()

    def poll(self, tick: int, observation: Observation, decision_tick: bool) -> InterventionCommand | None:
        """The human's command for this tick; None while the policy has the robot. Call once a tick."""
        if not self._in_control:
            now = progress(self._env)
            if now > self._best + 0.005 or now < self._best - 0.5:  # better, or dropped: measured from here
                self._best, self._since_rise = now, 0
                return None
            self._since_rise += 1
            if self._since_rise < STALL_TICKS:
                return None
            self._in_control = True
            self._correcting = int(self._rng.integers(*CORRECTION_TICKS, endpoint=True))
            self._hands.reset(int(self._rng.integers(2**31)))
        if self._correcting > 0:
            self._correcting -= 1
            return InterventionCommand(self._hands.act())
        if not decision_tick:
            return InterventionCommand(np.zeros(task.ACTION_DIM, np.float32), idle=True)
        self._in_control = False
        self._watch()
        return None

    def close(self) -> None:
        """Nothing to release."""

    def _watch(self) -> None:
        self._best, self._since_rise = progress(self._env), 0

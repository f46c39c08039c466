"""What aloha_sim's scripted demonstrators share: a plan of commands that is played with a smooth disturbance."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from serl_chunk.robots.aloha_sim import AlohaSimEnv

OPEN, CLOSED = 1.0, 0.0  # a gripper
NOISE_MEMORY = 0.95  # of the noise, per tick: a time constant of 0.4 s


class PlannedExpert:
    """Plays commands per tick, `float64[T, 14]`, that a subclass plans; after the last one it is held.

    `noise` (rad, default 0) is the standard deviation of a smooth disturbance added to every arm joint's command, for
    demonstrations that differ; the grippers stay clean.
    """

    def __init__(self, env: AlohaSimEnv) -> None:
        self.noise = 0.0
        self._env = env
        self._plan = np.empty((0, 14))

    def plan(self) -> np.ndarray:
        """The commands from the present moment on, right after a reset."""
        raise NotImplementedError

    def replan(self, tick: int) -> np.ndarray | None:
        """What is added to the plan at `tick`, if anything."""
        return None

    def reset(self, seed: int) -> None:
        """Plan from the arms' and the objects' present poses; `seed` determines the noise."""
        self._rng = np.random.default_rng(seed)
        self._disturbance = np.zeros(14)
        self._tick = 0
        self._plan = self.plan()

    def act(self) -> np.ndarray:
        """The command of the present tick, `float32[14]`; call once per tick, after `reset`."""
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
    """Shares `float64[ticks]` of a way, ending in 1, with zero velocity and acceleration at both ends."""
    s = np.arange(1, ticks + 1) / ticks
    return s**3 * (10 - 15 * s + 6 * s**2)

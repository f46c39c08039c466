"""How long a gripper may press hard: its motor gets hot at an effort that it may well have for seconds.

A gripper closes towards its lower limit. One that was above its effort for too long relaxes: its goal stays GIVE of its
range below where it was measured then, which is less than what it was commanded and still presses. It gives way no
further, and does what it is commanded as soon as that is to open. Grippers of a robot that stands do not relax, for
nothing moves in HOLD: their time counts, and they relax once the robot moves again.
"""

from __future__ import annotations

from typing import Tuple

import numpy as np

from serl_chunk_robot.safety.limits import GripLimits, Limits

GIVE = 0.02  # of a gripper's range: how far below the measured place a relaxed one still aims
GRIP = "grip"  # the reason of a pass in which a gripper was relaxed


class Grip:
    """Grippers under the limits of a profile; without such limits it changes no goal.

    Seconds above the effort add up, and those below are taken off again, so that a short rest is no new beginning.
    """

    def __init__(self, limits: Limits) -> None:
        self._of = limits.grip or GripLimits(np.full(len(limits.low), np.inf))
        self._give = GIVE * (limits.high - limits.low)
        self.begin()

    def begin(self) -> None:
        """Forget what was measured: the robot was stopped, and its grippers may have been opened by hand."""
        self._pressed = np.zeros_like(self._give)  # s
        self._floor = np.full_like(self._give, -np.inf)  # the least goal of a relaxed gripper

    def measured(self, q: np.ndarray, effort: np.ndarray, dt: float) -> None:
        """Take a believed sample, float64[J] each, `dt` seconds after the last one."""
        hard = np.abs(effort) > self._of.effort
        self._pressed = np.maximum(self._pressed + np.where(hard, dt, -dt), 0.0)
        late = hard & (self._pressed > self._of.seconds) & np.isneginf(self._floor)
        self._floor = np.where(late, q - self._give, self._floor)

    def goal(self, goal: np.ndarray) -> Tuple[np.ndarray, bool]:
        """The goal, float64[J], with relaxed grippers in their places, and whether one was relaxed."""
        opens = goal >= self._floor
        if opens.all():
            self._floor[:] = -np.inf
            return goal, False
        self._floor[opens] = -np.inf
        return np.maximum(goal, self._floor), True

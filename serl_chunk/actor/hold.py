"""What a robot does on a tick that nothing is planned for."""

from __future__ import annotations

import numpy as np

from serl_chunk.types import RobotSpec


class HoldPolicy:
    """Commands float32[A], robot units, that keep a robot where it is.

    Repeating a position holds it; repeating a difference would keep the robot moving. Dimensions that command a
    measured joint, and grippers, are positions; all others are taken for differences, and hold at 0.
    """

    def __init__(self, spec: RobotSpec) -> None:
        self._joint = np.array(spec.joint_of_action)
        self._is_position = self._joint >= 0
        self._is_position[list(spec.grippers)] = True
        self._low, self._high = np.array(spec.action_low), np.array(spec.action_high)
        self._no_motion = np.clip(0.0, self._low, self._high).astype(np.float32)

    def initial(self, state: np.ndarray) -> np.ndarray:
        """Before anything was executed: the joints measured in `state` float32[S], within the limits, else 0."""
        rest = np.where(self._joint >= 0, state[np.maximum(self._joint, 0)], 0.0)
        return np.clip(rest, self._low, self._high).astype(np.float32)

    def next(self, action: np.ndarray) -> np.ndarray:
        """After `action` float32[A] was executed."""
        return np.where(self._is_position, action, self._no_motion)

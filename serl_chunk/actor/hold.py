"""Commands that keep a robot still on ticks that nothing is planned for."""

from __future__ import annotations

import numpy as np

from serl_chunk.config.robots import GymConfig, RobotConfig
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
        """Return the hold before the first action: joints measured in `state` float32[S], in the limits, else 0."""
        rest = np.where(self._joint >= 0, state[np.maximum(self._joint, 0)], 0.0)
        return np.clip(rest, self._low, self._high).astype(np.float32)

    def next(self, action: np.ndarray) -> np.ndarray:
        return np.where(self._is_position, action, self._no_motion)


def with_kept(command: np.ndarray, hold: np.ndarray, dimensions: tuple[int, ...]) -> np.ndarray:
    """`command` [..., A] with `dimensions` of `hold`, which only a human changes (`agent.gripper.mode=fixed`)."""
    if not dimensions:
        return command
    command, kept = np.array(command), list(dimensions)
    command[..., kept] = hold[kept]
    return command


def hold_warning(config: RobotConfig, spec: RobotSpec) -> str | None:
    """Return a warning where a hold of 0 is a guess; None where the configuration defines the hold.

    It is a guess for a user's environment that names neither grippers nor measured joints, and for unmeasured actions
    whose limits do not have 0 inside.
    """
    if not isinstance(config, GymConfig) or config.joint_of_action:
        return None
    free = [i for i, joint in enumerate(spec.joint_of_action) if joint < 0 and i not in spec.grippers]
    if config.grippers:
        free = [i for i in free if not spec.action_low[i] < 0 < spec.action_high[i]]
    if not free:
        return None
    dimensions, confirmed = ", ".join(map(str, free)), ", ".join(["-1"] * len(spec.joint_of_action))
    return (
        f"nothing measures where action dimensions {dimensions} of robot {spec.name!r} are: on a tick without "
        "an action they are commanded 0, which stops a velocity, but moves a position and may open a gripper. Name "
        "grippers in robot.grippers and measured joints in robot.joint_of_action. If all of them are velocities or "
        f"differences, robot.joint_of_action=({confirmed}) confirms it"
    )

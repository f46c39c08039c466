"""Limits and arms of the robot server's benchmark and tests: two ViperX of six joints and a gripper each."""

from __future__ import annotations

import numpy as np

from serl_chunk_robot.geometry.kinematics import Arms, Chain, Link
from serl_chunk_robot.safety.motion import Limits, Rates, Workspace

J, GRIPPERS = 14, (6, 13)
HOME = np.tile([0, -0.96, 1.16, 0, -0.3, 0, 0.5], 2)
LOW = np.tile([-3.14, -1.85, -1.76, -3.14, -1.87, -3.14, 0.0], 2)
HIGH = np.tile([3.14, 1.26, 1.6, 3.14, 2.23, 3.14, 1.0], 2)
LINKS = [
    Link((0, 0, 0.079), (0, 0, 1)),
    Link((0, 0, 0.04805), (0, 1, 0)),
    Link((0.05955, 0, 0.3), (0, 1, 0)),
    Link((0.2, 0, 0), (1, 0, 0)),
    Link((0.1, 0, 0), (0, 1, 0)),
    Link((0.069744, 0, 0), (1, 0, 0)),
]
SPACE = Workspace(np.array([-0.8, -0.1, 0.02]), np.array([0.8, 1.1, 0.9]), between_arms=0.05, radius=0.03)


def viperx(yaw: float = np.pi) -> Arms:
    """ALOHA's two arms, as gym_aloha places them. `yaw`: of the right one's base."""
    tip = (0.15, 0, 0)
    chains = [Chain((-0.469, 0.5, 0), 0.0, LINKS, tip), Chain((0.469, 0.5, 0), yaw, LINKS, tip)]
    return Arms(chains, [range(6), range(7, 13)], J)


def limits(v: float = 3.2, a: float = 40.0, j: float = 4000.0, workspace: Workspace | None = None) -> Limits:
    """One profile for all joints, but for grippers."""
    rates = Rates(*(np.full(J, x) for x in (v, a, j)))
    for of_joints, of_gripper in zip(rates, (10.0, 1e4, 1e7), strict=True):
        of_joints[list(GRIPPERS)] = of_gripper
    return Limits(LOW, HIGH, rates, np.full(J, 0.3), np.full(J, 0.1), 1.5 * rates.velocity, workspace=workspace)

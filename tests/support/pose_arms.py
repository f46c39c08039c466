"""Simulated arms that are commanded by poses of their tips, `driver = "pose_arms.py:PoseArms"`."""

from __future__ import annotations

import numpy as np

from serl_chunk_robot.drivers.base import DriverSpec
from serl_chunk_robot.drivers.fake import FakeArms

HOME = np.array([0.4, 0.0, 0.2, 3.0, 0.0, 0.5, 0.5])
LOW = (0.2, -0.4, 0.05, 1.5, -1.0, -2.5, 0.0)
HIGH = (0.7, 0.4, 0.6, 4.5, 1.0, 2.5, 1.0)


class PoseArms(FakeArms):
    """Arms of a tip and a gripper each, whose coordinates follow their targets."""

    def __init__(self, arms: int = 1) -> None:
        spec = DriverSpec(
            "pose arms", LOW * arms, HIGH * arms, (0.5, 0.5, 0.5, 1.5, 1.5, 1.5, 10.0) * arms,
            tuple(range(6, 7 * arms, 7)), tuple((k, k + 7) for k in range(0, 7 * arms, 7)), (("q", 7 * arms),),
            targets="poses",
        )  # fmt: skip
        super().__init__(spec, np.tile(HOME, arms))

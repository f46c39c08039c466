"""Simulated arms with an ALOHA's joints, for a rehearsal (`lab.py`) without ROS: those of the driver `fake`."""

from __future__ import annotations

import numpy as np

from serl_chunk_robot.drivers.aloha_arms import HIGH, LOW, VELOCITY
from serl_chunk_robot.drivers.base import DriverSpec
from serl_chunk_robot.drivers.fake import HOME, SAG, FakeArms

ARMS = 2


def lab_arms() -> FakeArms:
    """Make both arms, with the limits of the real ones."""
    joints = len(HOME)
    spec = DriverSpec(
        "fake aloha arms", LOW * ARMS, HIGH * ARMS, VELOCITY * ARMS, tuple(range(joints - 1, joints * ARMS, joints)),
        tuple((first, first + joints) for first in range(0, joints * ARMS, joints)), (("q", joints * ARMS),),
        200.0, 0.02,
    )  # fmt: skip
    return FakeArms(spec, np.array(HOME * ARMS), rest=np.array(HOME * ARMS) + np.array(SAG * ARMS))

"""The limits of a robot under one profile, as the gate applies them."""

from __future__ import annotations

from typing import NamedTuple, Optional

import numpy as np

from serl_chunk_robot.safety.motion import Rates


class Workspace(NamedTuple):
    """Where an arm's points may be, metres in the world: a box, whose floor is the table, and the arms' distance.

    `radius` is that of the sphere around each point of the arm.
    """

    low: np.ndarray  # float64[3]
    high: np.ndarray
    between_arms: float = 0.0
    radius: float = 0.0


class GripLimits(NamedTuple):
    """Of the grippers, in a profile. Other joints, and grippers without a limit, have an infinite effort."""

    effort: np.ndarray  # float64[J], of either sign
    seconds: float = 10.0


class Limits(NamedTuple):
    """Of J joints, all arms together, in the order of the command; arrays are float64[J]."""

    low: np.ndarray  # rad, or a gripper's own unit
    high: np.ndarray
    rates: Rates
    following: np.ndarray  # largest distance of the set point from the measured joint
    first: np.ndarray  # largest distance of a first command from the set point
    overspeed: np.ndarray  # measured velocity that stops the robot
    workspace: Optional[Workspace] = None
    grip: Optional[GripLimits] = None  # the gate does not read it

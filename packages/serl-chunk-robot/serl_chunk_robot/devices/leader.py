"""ALOHA's own leader arms, through ROS 1 or ROS 2 and Interbotix's nodes: their joints and grippers, read alone."""

from __future__ import annotations

import math
import time
from typing import Any, Callable, Dict, Sequence, Tuple

import numpy as np

from serl_chunk_robot.devices.base import SILENT, DeviceError, Sample, lifeless
from serl_chunk_robot.drivers.aloha_arms import FIRST_STATE, MOTORS, Gripper, Ros
from serl_chunk_robot.drivers.aloha_ros1 import Ros1
from serl_chunk_robot.drivers.aloha_ros2 import Ros2
from serl_chunk_robot.drivers.base import DriverError
from serl_chunk_robot.drivers.stamps import StampMap

EXACT = 1e-3  # rad: a node reports -pi of motors that do not answer


def leaders_ros1(
    *,
    arms: Sequence[str] = ("master_left", "master_right"),
    gripper_closed: float = -0.6842,
    gripper_open: float = 0.3083,
) -> LeaderArms:
    """Open the leaders of ROS 1. The defaults are those of the first ALOHA.

    `arms`: names of the leaders' nodes; `gripper_closed`, `gripper_open`: angles of a leader gripper's motor, rad.
    """
    return LeaderArms(Ros1(), arms, Gripper(gripper_closed, gripper_open))


def leaders_ros2(
    *,
    arms: Sequence[str] = ("leader_left", "leader_right"),
    gripper_closed: float = -0.0552,
    gripper_open: float = 0.8298,
) -> LeaderArms:
    """Open the leaders of ROS 2. The defaults are those of ALOHA 2; else as `leaders_ros1`."""
    return LeaderArms(Ros2(), arms, Gripper(gripper_closed, gripper_open))


class LeaderArms:
    """Leader arms as one device: float64[7 N], six joints (rad) and a gripper of each arm.

    A gripper is the share of its motor's way from closed to open, 0 to 1, as in the actions of ALOHA's own recordings.
    Threads of ROS take the states in. The stamp is that of the arm whose newest state is older; a state whose stamp is
    repeated gets older. Without a newer state for 0.2 s the device is not alive; it is alive again with the next one.

    Args:
        ros: the node, not opened yet.
        arms: names of the arms' nodes, left first.
        gripper: of all arms.
        clock: the machine's monotonic clock, s.

    Raises DeviceError: no ROS, or an arm without a state for 2 s.
    """

    def __init__(
        self, ros: Ros, arms: Sequence[str], gripper: Gripper, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if isinstance(arms, str) or not arms or len({*arms}) < len(arms):
            raise DeviceError(f"{arms!r}, expected a list of different names of nodes", parameter="arms")
        if gripper.closed == gripper.open:
            raise DeviceError(
                f"{gripper.open!r} twice, expected two angles in rad", parameter="gripper_closed, gripper_open"
            )
        self.name = " ".join(arms)
        self._ros, self._arms, self._gripper, self._clock = ros, tuple(arms), gripper, clock
        self._stamps = {arm: StampMap() for arm in self._arms}
        self._states: Dict[str, Tuple[np.ndarray, float]] = {}  # joints, stamp
        self._wrong: Dict[str, str] = {}
        try:
            ros.open(self._arms, self._heard)
        except DriverError as e:
            ros.close()
            raise DeviceError(f"{self.name}: {e}") from e
        until = time.monotonic() + FIRST_STATE
        while time.monotonic() < until and len(self._states) < len(self._arms):
            time.sleep(0.005)
        for arm in self._arms:
            if arm not in self._states:
                ros.close()
                why = self._wrong.get(arm, f"no state within {FIRST_STATE:g} s. Launch the leaders' nodes")
                raise DeviceError(f"/{arm}/joint_states: {why}")

    def read(self) -> Sample:
        states = [self._states[arm] for arm in self._arms]
        stamp = min(at for _, at in states)
        sample = Sample(None, np.concatenate([joints for joints, _ in states]), (), stamp, True)
        dead = self._clock() - stamp > SILENT or not self._ros.alive()
        return lifeless(sample) if dead else sample

    def close(self) -> None:
        self._ros.close()

    def _heard(self, arm: str, message: Any, stamp: float) -> None:
        arrival = self._clock()
        try:
            names = list(message.name)
            joints = np.array([message.position[names.index(motor)] for motor in MOTORS], np.float64)
        except (ValueError, IndexError) as e:
            self._wrong[arm] = f"no state of an ALOHA arm ({e})"
            return
        if (np.abs(joints + math.pi) < EXACT).all():
            self._wrong[arm] = "its motors do not answer. Check their power and cables"
            return
        share = (joints[-1] - self._gripper.closed) / (self._gripper.open - self._gripper.closed)
        joints[-1] = min(max(share, 0.0), 1.0)
        self._states[arm] = joints, self._stamps[arm].moment(stamp, arrival) if stamp else arrival

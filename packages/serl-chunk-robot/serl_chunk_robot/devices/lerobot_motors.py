"""The motors of LeRobot's leaders, as `leader_motion` drives them: Feetech's alone, whose torque can be limited."""

from __future__ import annotations

from typing import Dict, Sequence, Tuple

import numpy as np

from serl_chunk_robot.drivers.base import DriverError
from serl_chunk_robot.drivers.lerobot_joints import Joints
from serl_chunk_robot.drivers.lerobot_library import DEGREES, SHARE, Arm, drop_late_answers, text

LIMIT, FULL = "Torque_Limit", 1000  # register, and its value for all of a motor's torque
TRIES = 3  # of a write that an answer confirms


def can_drive(arms: Sequence[Arm]) -> bool:
    """Whether the torque of all motors can be limited, so that a hand holds them."""
    tables = [(arm.bus, getattr(arm.bus, "model_ctrl_table", {})) for arm in arms]
    return all(LIMIT in table.get(motor.model, {}) for bus, table in tables for motor in bus.motors.values())


class LeRobotMotors:
    """The motors of a leader with one arm or two: joints in rad, and grippers from 0 closed to 1 open.

    All calls come from the thread that reads the leader, and raise what LeRobot raises.

    Args:
        arms: whose buses are open.
        joints: names and order.
        scale: of each joint, float64[J]: what LeRobot's numbers are multiplied by.
        torque: share of a motor's torque, above 0, to 1.
    """

    def __init__(self, arms: Sequence[Arm], joints: Joints, scale: np.ndarray, torque: float) -> None:
        self._arms, self._names, self._scale = arms, joints.names, scale
        self._limit = max(1, round(FULL * torque))

    def reach(self) -> Tuple[np.ndarray, np.ndarray]:
        """Return the lowest and highest joints of the calibrated ranges, float64[J] each."""
        ends: Dict[str, Tuple[float, float]] = {}
        for arm in self._arms:
            for name, motor in arm.bus.motors.items():
                calibration, mode = arm.bus.calibration[name], motor.norm_mode.value
                half = 100.0
                if mode == DEGREES:  # 0 is in the middle of the range
                    steps = arm.bus.model_resolution_table[motor.model] - 1
                    half = 180.0 * (calibration.range_max - calibration.range_min) / steps
                ends[arm.prefix + name] = (0.0 if mode == SHARE else -half), half
        both = self._scale * np.array([ends[name] for name in self._names], np.float64).T
        return both.min(axis=0), both.max(axis=0)

    def hold(self, joints: np.ndarray) -> None:
        """Limit the torque of all motors, and give it to them with a set point where they are."""
        for arm in self._arms:
            for motor in arm.bus.motors:
                arm.bus.write(LIMIT, motor, self._limit, normalize=False, num_retry=TRIES - 1)
        # The set point first: a motor goes to the one that it has as soon as it gets torque.
        self.move(joints)
        for arm in self._arms:
            arm.bus.enable_torque(num_retry=TRIES - 1)

    def move(self, joints: np.ndarray) -> None:
        values = dict(zip(self._names, (joints / self._scale).tolist()))
        for arm in self._arms:
            arm.bus.sync_write("Goal_Position", {motor: values[arm.prefix + motor] for motor in arm.bus.motors})

    def release(self) -> None:
        """Take the torque of all motors by one packet an arm, and see that it is gone.

        LeRobot's `disable_torque` writes to one motor after the other, and ends at the first that does not answer.
        """
        failed: Dict[str, str] = {}
        for arm in self._arms:
            why = "a motor keeps its torque"
            for _ in range(TRIES):
                try:
                    arm.bus.sync_write("Torque_Enable", dict.fromkeys(arm.bus.motors, 0), normalize=False)
                    if not any(arm.bus.sync_read("Torque_Enable", normalize=False).values()):
                        break
                except Exception as e:  # of LeRobot, of no common kind; the other arm's motors lose theirs
                    why = text(e)
                    drop_late_answers([arm])
            else:
                failed[arm.bus.port] = why
        if failed:
            ports = "; ".join(f"{port} ({why})" for port, why in failed.items())
            raise DriverError(f"its motors may have torque: {ports}. Switch their power off")

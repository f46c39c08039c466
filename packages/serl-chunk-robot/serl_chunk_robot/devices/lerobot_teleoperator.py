"""Leader arms of LeRobot whose motors are on its serial buses: SO-100, SO-101, Koch, OMX, two SO arms, and plug-ins."""

from __future__ import annotations

import contextlib
import time
from typing import Any, Callable, List, Mapping, Optional, Sequence

import numpy as np

from serl_chunk_robot.devices.base import SILENT, DeviceError, Sample
from serl_chunk_robot.devices.leader_motion import LeaderDrive
from serl_chunk_robot.devices.polling import PolledDevice
from serl_chunk_robot.drivers import lerobot_library as lerobot
from serl_chunk_robot.drivers.base import DriverError, why


class LeRobotTeleoperator(PolledDevice):
    """A teleoperator of LeRobot as a device: its joints in rad and its grippers from 0 closed to 1 open.

    It runs in LeRobot's own environment. Motors are written to only after their calibration was found to be that of the
    id: those of another arm keep their torque. LeRobot then switches torque off, and gives it to the gripper of a Koch
    or OMX leader, which springs open. A reading's stamp is the time before its bus was read. A read that fails is tried
    again; without one for 0.2 s the device is not alive, and is opened again.

    Args:
        type: LeRobot's name of the teleoperator, as "so101_leader".
        params: of its config, as `port` and `id`.
        joints: names of the motors in the order of the robot's joints; without it those of an SO arm, or of two.
        grippers: names of those that are grippers; without it those that end with "gripper".
        scale: what LeRobot's numbers are multiplied by; without it, it follows from the motors' units and calibration.
        drive_torque: share of their torque that Feetech's motors have while they are driven (`devices.drive`).

    Raises DeviceError: an option that cannot be, no LeRobot, no such teleoperator, one that gives no joint positions,
    whose motors are on no serial bus, or that is not calibrated, or motors that do not answer.
    """

    pause = 0.002

    def __init__(
        self, *, type: str, params: Optional[Mapping[str, Any]] = None, joints: Sequence[str] = (),
        grippers: Sequence[str] = (), scale: lerobot.Numbers = (), drive_torque: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        if not isinstance(params or {}, Mapping):
            example = '{ port = "/dev/ttyACM1", id = "my_leader" }'
            raise DeviceError(f"{params!r}, expected a table, as {example}", parameter="params")
        try:
            self._joints = lerobot.Joints(type, joints, grippers)
            self._given = self._joints.scale(scale)
        except ValueError as e:
            raise DeviceError(str(e)) from e
        if not (isinstance(drive_torque, (int, float)) and 0 < drive_torque <= 1):
            raise DeviceError(f"{drive_torque!r}, expected a number above 0, to 1", parameter="drive_torque")
        self._type, self._params, self._torque = type, dict(params or {}), float(drive_torque)
        self._made: Any = None
        self._arms: List[lerobot.Arm] = []
        self._configured = False
        self._scale: Any = None  # float64[J]
        self._newest: Optional[Sample] = None
        shown = self._params.get("id") or self._params.get("port") or ""
        super().__init__(f"{type} {shown}".rstrip(), clock)

    def _open(self) -> None:
        try:
            self._made = lerobot.make_teleoperator(self._type, self._params)
            self._arms = lerobot.arms_of(self._made, lerobot.REPEATS)
            self._joints.check(self._type, self._made)
            command = lerobot.calibration_command(lerobot.TELEOPERATOR, self._type, self._params)
            lerobot.open_buses(self._arms, f"Run {command}")
            self._scale = self._units() if self._given is None else self._given
            self._configured = True
            for arm in self._arms:
                arm.robot.configure()
            self._prepare_drive()
        except DriverError as e:
            raise DeviceError(str(e)) from e
        except Exception as e:  # of LeRobot, of no common kind
            raise DeviceError(f"{self.name}: its motors do not answer ({why(e)}). Check power and port") from e

    def _look(self) -> Sample:
        began = self._clock()
        try:
            action = self._made.get_action()
            values = np.array([action[key] for key in self._joints.keys], np.float64)
            if not np.isfinite(values).all():
                raise DeviceError(f"{self.name}: no number for each joint ({action!r})")
        except Exception:
            lerobot.drop_late_answers(self._arms)
            if self._newest is None or self._clock() - self._newest.stamp > SILENT:
                raise
            return self._newest  # with its stamp
        joints = self._scale * values
        joints[self._joints.gripper] = np.clip(joints[self._joints.gripper], 0.0, 1.0)
        self._newest = Sample(None, joints, (), began, True)
        return self._newest

    def _release(self) -> None:
        arms, self._arms = self._arms, []
        configured, self._configured = self._configured, False
        if configured and self.drive is not None:
            with contextlib.suppress(Exception):  # LeRobot tries motor by motor then, until one does not answer
                self.drive.motors.release()
        for arm in arms:
            lerobot.close_bus(arm, configured)

    def _prepare_drive(self) -> None:
        """Let motors be driven that can be. What the drive reports outlasts a loss of the device."""
        if not lerobot.can_drive(self._arms):
            return
        motors = lerobot.LeRobotMotors(self._arms, self._joints, self._scale, self._torque)
        if self.drive is None:
            self.drive = LeaderDrive(self.name, motors, len(self._joints.names))
        self.drive.motors = motors

    def _units(self) -> np.ndarray:
        """Return the scale of each joint, float64[J]. Raises DriverError for units that are not known."""
        of = {arm.prefix + motor: (arm, motor) for arm in self._arms for motor in arm.bus.motors}
        found = []
        for joint, gripper in zip(self._joints.names, self._joints.gripper):
            arm, motor = of[joint]
            factor = lerobot.per_unit(arm, motor, bool(gripper))
            if factor is None:
                unit = arm.bus.motors[motor].norm_mode.value
                raise DriverError(f"{joint}: its unit is {unit}. {lerobot.WRITE_SCALE}")
            found.append(factor)
        return np.array(found)

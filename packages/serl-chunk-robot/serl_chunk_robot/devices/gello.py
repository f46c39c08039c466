"""A GELLO leader: Dynamixel servos on a serial line, as joints of the robot that it copies."""

from __future__ import annotations

import math
import time
from typing import Any, Callable, List, Optional, Sequence

import numpy as np

from serl_chunk_robot.devices.base import DeviceError, Sample
from serl_chunk_robot.devices.polling import PolledDevice
from serl_chunk_robot.drivers.base import vendor

PROTOCOL = 2.0
POSITION, LENGTH = 132, 4  # register and bytes of an X servo's position
TURN = 4096  # of its units
TRIES = 3  # at opening


class Gello(PolledDevice):
    """A GELLO whose servos are read together, without torque: it writes nothing to them.

    A joint is `sign * (servo - offset)`, brought into [-pi, pi] by full turns when the device is opened, and continuous
    from then on. A gripper is the last servo, from 0 closed to 1 open. The reading's stamp is that of the newest
    answer; without one for 0.2 s, the device is not alive.

    A USB adapter of FTDI's answers 60 times a second unless its latency timer is 1 ms: write 1 to
    /sys/bus/usb-serial/devices/ttyUSB0/latency_timer.

    Args:
        port: path of the serial line, such as a link in /dev/serial/by-id.
        ids: of the servos: the joints in order, then that of the gripper if there is one.
        offsets: servo's angle at which its joint is 0, rad, for each joint.
        signs: 1 or -1 for each joint.
        gripper_closed, gripper_open: angles of the gripper's servo, rad; default: no gripper.
        baud: of the line, as the servos have it.

    Raises DeviceError: no library, no such port, no rights, servos that do not answer, or lists of other lengths.
    """

    pause = 0.002

    def __init__(
        self, port: str, ids: Sequence[int], offsets: Sequence[float], signs: Sequence[int],
        gripper_closed: Optional[float] = None, gripper_open: Optional[float] = None, baud: int = 57600,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        grips = gripper_closed is not None and gripper_open is not None and gripper_closed != gripper_open
        if not grips and (gripper_closed, gripper_open) != (None, None):
            got = f"{gripper_closed!r}, {gripper_open!r}"
            raise DeviceError(f"{got}, expected two angles in rad", parameter="gripper_closed, gripper_open")
        joints = len(ids) - grips
        if joints < 1 or len({*ids}) < len(ids) or not all(0 <= i <= 252 for i in ids):
            raise DeviceError(f"{list(ids)}, expected different numbers from 0 to 252", parameter="ids")
        for name, values in (("offsets", offsets), ("signs", signs)):
            if len(values) != joints:
                raise DeviceError(f"{list(values)}, expected {joints} numbers, one for each joint", parameter=name)
        if not all(abs(sign) == 1 for sign in signs):
            raise DeviceError(f"{list(signs)}, expected 1 or -1 for each joint", parameter="signs")
        self._ids, self._baud = [int(i) for i in ids], baud
        self._offsets, self._signs = np.array(offsets, np.float64), np.array(signs, np.float64)
        self._gripper = (float(gripper_closed or 0.0), float(gripper_open or 0.0)) if grips else None
        self._port: Any = None
        self._sdk: Any = None
        self._group: Any = None
        self._newest: Any = None  # Sample
        super().__init__(port, clock)

    def _open(self) -> None:
        sdk = vendor("dynamixel_sdk", DeviceError, "Run: pip install dynamixel-sdk")
        self._sdk, self._port = sdk, sdk.PortHandler(self.name)
        try:
            opened = self._port.setBaudRate(self._baud)  # opens it
        except OSError as e:  # also pyserial's
            if e.errno == 13 or isinstance(e, PermissionError):
                remedy = "Run: sudo usermod -aG dialout $USER, and log in anew"
            else:
                remedy = "Is it plugged in? Run: ls /dev/serial/by-id"
            raise DeviceError(f"{self.name}: cannot be opened ({e}). {remedy}") from e
        if not opened:
            raise DeviceError(
                f"{self._baud!r}, expected a rate of Dynamixel servos, such as 57600 or 1000000", parameter="baud"
            )
        self._group = sdk.GroupSyncRead(self._port, sdk.PacketHandler(PROTOCOL), POSITION, LENGTH)
        for servo in self._ids:
            self._group.addParam(servo)
        for _ in range(TRIES):
            angles = self._angles()
            if angles is not None:
                break
        else:
            missing = next((i for i in self._ids if not self._group.data_dict.get(i)), self._ids[0])
            raise DeviceError(
                f"{self.name}: no answer of servo {missing} at {self._baud} baud. "
                "Check their power, ids and baud rate with Dynamixel Wizard"
            )
        joints = self._signs * (angles[: len(self._signs)] - self._offsets)
        self._turns = np.round(joints / math.tau) * math.tau
        self._take(angles)

    def _look(self) -> Sample:
        angles = self._angles()
        if angles is not None:
            self._take(angles)
        return self._newest  # type: ignore[no-any-return]

    def _release(self) -> None:
        port, self._port = self._port, None
        if port is not None and port.is_open:
            port.closePort()

    def _angles(self) -> Optional[np.ndarray]:
        if self._group.txRxPacket() != self._sdk.COMM_SUCCESS:
            return None
        raw: List[int] = [self._group.getData(servo, POSITION, LENGTH) for servo in self._ids]
        return np.array(raw, np.uint32).astype(np.int32) * (math.tau / TURN)

    def _take(self, angles: np.ndarray) -> None:
        n = len(self._signs)
        joints = self._signs * (angles[:n] - self._offsets) - self._turns
        if self._gripper is not None:
            closed, opened = self._gripper
            opening = (angles[-1] - closed) / (opened - closed)
            joints = np.append(joints, min(max(opening, 0.0), 1.0))
        self._newest = Sample(None, joints, (), self._clock(), True)

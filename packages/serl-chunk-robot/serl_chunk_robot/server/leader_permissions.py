"""Permissions to drive leaders to their arms: when the server gives them, and how they reach a device's process.

A controller requests a drive again and again while its robot stands in HOLD. In each pass the server gives a
permission, which is valid for a moment. Whatever happens to either of them or to the robot, no permission follows, and
the leader loses its torque (`devices.drive`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections import deque
from time import monotonic
from typing import Any, Deque, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from serl_chunk_robot.control.loop import Refused, Status
from serl_chunk_robot.devices.leader_motion import LeaderDrive, Permission
from serl_chunk_robot.safety.motion import Limits, Rates
from serl_chunk_robot.safety.table import HOLD
from serl_chunk_robot.wire import arrays, codec
from serl_chunk_robot.wire.codec import WireError

logger = logging.getLogger(__name__)

RENEWED = 0.3  # s for which a request permits
STOOD = 1e-3  # rad by which the set point of a robot that stands may differ
ENDED = 64  # drives that ended, and do not begin again
LARGEST = 8192  # bytes of a permission: of 100 joints it has 6000
OF_LIMITS = ("low", "high", "velocity", "acceleration", "jerk")


class _Drive(NamedTuple):
    number: int
    first: Dict[str, int]  # name of a device -> the first of the robot's joints that it leads
    connection: bytes
    set_point: np.ndarray
    until: float


class Drives:
    """The permissions of one robot's server, which calls it from one thread.

    `devices`: names of the tables [[device]]; `limits`: of the cautious profile, under which leaders move.
    """

    def __init__(self, devices: Sequence[str] = (), limits: Optional[Limits] = None) -> None:
        self._pairs: Dict[str, Tuple[socket.socket, socket.socket]] = {}  # this end, and that of the device's process
        for name in devices:
            self._pairs[name] = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
            for end in self._pairs[name]:
                end.setblocking(False)
        self._limits = {} if limits is None else dict(zip(OF_LIMITS, (limits.low, limits.high, *limits.rates)))
        self._drive: Optional[_Drive] = None
        self._ended: Deque[int] = deque([0], maxlen=ENDED)  # numbers of drives that ended

    def descriptors(self) -> Dict[str, int]:
        """Return the descriptor of each device's end, which its process inherits, also one that is started anew."""
        return {name: theirs.fileno() for name, (_, theirs) in self._pairs.items()}

    def request(
        self, values: Dict[str, Any], connection: bytes, state: str, set_point: Optional[np.ndarray], now: float,
        age: float = 0.0,
    ) -> None:  # fmt: skip
        """Begin, renew or end a drive, of the connection that holds the lease.

        Args:
            values: "number" of the drive, another one for each; "first": device -> joint; empty: the drive ends.
            age: s since it was sent.

        Raises:
            Refused: the robot does not stand in HOLD, there is no such device, or the drive has ended.
            WireError: the request has other fields.
        """
        number, first = codec.count(values, "number"), codec.field(values, "first", dict)
        if not first:
            self.end("the actor ended it")
            return
        if state != HOLD or set_point is None:
            raise Refused(f"drive: leaders are driven while the robot stands in HOLD, and it is in {state}")
        for name, joint in first.items():
            if name not in self._pairs:
                raise Refused(f"drive: no device {name!r} (the server has {', '.join(self._pairs) or 'none'})")
            if type(joint) is not int or not 0 <= joint < len(set_point):
                raise Refused(f"drive: {joint!r}, expected a joint from 0 to {len(set_point) - 1}")
        if age > RENEWED:
            raise Refused(f"drive: it was sent {age:.1f} s ago")
        if number in self._ended:
            raise Refused("drive: it has ended. Request another one")
        drive = self._drive
        if drive is None or drive.number != number:
            self.end("another drive was requested")
            logger.info("drive: devices=%s", ", ".join(first))
            self._drive = _Drive(number, dict(first), connection, set_point.copy(), now + RENEWED)
        else:
            self._drive = drive._replace(until=now + RENEWED)

    def run_pass(self, status: Status, controller: bytes) -> None:
        """Permit the drive in this pass, or end it. `controller`: the connection that holds the lease."""
        drive = self._drive
        if drive is None:
            return
        at, reading = status.set_point, status.reading
        if status.state != HOLD:
            self.end(status.word)
        elif controller != drive.connection:
            self.end("the actor has lost its lease")
        elif status.moment > drive.until:
            self.end(f"the actor did not request it for {RENEWED:g} s")
        elif at is None or reading is None or np.abs(at - drive.set_point).max() > STOOD:
            self.end("the robot does not stand")
        else:
            for name, first in drive.first.items():
                limits = {key: of[first:] for key, of in self._limits.items()}
                self._send(name, {"number": drive.number, "moment": monotonic(), "q": reading.q[first:], **limits})

    def end(self, why: str) -> None:
        """End the drive, if there is one: its leaders lose their torque."""
        drive, self._drive = self._drive, None
        if drive is None:
            return
        self._ended.append(drive.number)
        for name in drive.first:
            self._send(name, {"number": drive.number, "ended": codec.shown(why)})

    def close(self) -> None:
        self.end("the server ends")
        for pair in self._pairs.values():
            for end in pair:
                end.close()

    def _send(self, name: str, values: Dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # its process reads none: without one, its leader loses its torque
            self._pairs[name][0].send(arrays.pack(values))


def take_permits(descriptor: int, drive: LeaderDrive) -> None:
    """Read all permissions that have come, in the device's process, and give them to the leader's drive."""
    for values in _read(descriptor):
        try:
            number = codec.count(values, "number")
            if "ended" in values:
                drive.end(number, str(values["ended"]))
                continue
            size = drive.size
            low, high, velocity, acceleration, jerk = (np.array(values[key][:size], np.float64) for key in OF_LIMITS)
            still = np.zeros(len(low))
            limits = Limits(low, high, Rates(velocity, acceleration, jerk), still, still, still)
            joints = np.array(values["q"][:size], np.float64)
            drive.permit(Permission(number, float(values["moment"]), joints, limits))
        except (WireError, KeyError, TypeError, ValueError) as e:
            logger.warning("a permission cannot be read: %s", e)


def _read(descriptor: int) -> List[Dict[str, Any]]:
    """Return the messages that have come, without waiting."""
    found: List[Dict[str, Any]] = []
    while True:
        try:
            found.append(arrays.unpack(os.read(descriptor, LARGEST), LARGEST))
        except BlockingIOError:
            return found
        except (OSError, WireError) as e:
            logger.warning("a permission cannot be read: %s", e)
            return found

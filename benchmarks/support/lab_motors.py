"""The simulated motors of a rehearsal's SO-101 (`lab.py`), behind a stand-in of LeRobot in the robot's server.

The folder `lab_lerobot` on PYTHONPATH installs it there. The operator's hand moves the leader through a socket.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import struct
from pathlib import Path

import lerobot_stand_in
import numpy as np
from lerobot_stand_in import HIGH, LOW, Port

from serl_chunk_robot.devices import leader_motion, polling
from serl_chunk_robot.server import leader_permissions

FOLDER = "SERL_CHUNK_LAB"  # variable of the environment: the folder of the hand's socket
LEADER = "leader"  # the socket, and the table [[device]] of the robot's file
PORTS = "/dev/ttyACM0", "/dev/ttyACM1"  # of the arm and its leader in experiments/robots/so101.toml
STEPS = 4095 / math.tau  # of an encoder, in a rad
MESSAGE = struct.Struct("<6f")  # encoder steps of each motor


def message_of(joints: np.ndarray) -> bytes:
    """Write where the hand has the leader. Args: rad, and the gripper's opening, float64[6]."""
    steps = (LOW + HIGH) / 2 + STEPS * joints
    steps[5] = LOW + (HIGH - LOW) * joints[5]
    return MESSAGE.pack(*np.clip(steps, LOW, HIGH))


class LeaderPort(Port):
    """The motors of the leader, which the hand moves where they have no torque. Args: folder of its socket."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._path, self._hand = folder / LEADER, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._hand.setblocking(False)

    def positions(self) -> list[float]:
        if not self._hand.getsockname():  # in the process that opened the port
            self._path.unlink(missing_ok=True)
            self._hand.bind(str(self._path))
        super().positions()
        with contextlib.suppress(BlockingIOError):
            while True:
                hand = MESSAGE.unpack(self._hand.recv(MESSAGE.size))
                self.at = [x if on else to for x, on, to in zip(self.at, self.torque, hand, strict=True)]
        return self.at


def install() -> None:
    """Let this process import LeRobot, to its end."""
    # Machines that rehearse may stand still for longer than robot PCs may.
    leader_motion.VALID = polling.SILENT = 0.5
    leader_permissions.RENEWED = 0.8
    _to_the_end.enter_context(lerobot_stand_in.installed(PORTS[0]))
    lerobot_stand_in.PORTS[PORTS[1]] = LeaderPort(Path(os.environ[FOLDER]))


_to_the_end = contextlib.ExitStack()

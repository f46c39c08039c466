"""A simulated leader that can be driven, in a process of its own, and a served robot whose right arm it leads."""

from __future__ import annotations

import contextlib
from pathlib import Path
from unittest.mock import patch

import numpy as np
from robot_limits import GRIPPERS, HIGH, HOME, LOW, J
from robot_served import HERE, free_port, served
from robot_world import TICK

from serl_chunk.types import RobotSpec
from serl_chunk_robot.robot_file.config import load
from serl_chunk_robot.robot_file.profiles import CAUTIOUS
from serl_chunk_robot.server.leader_permissions import Drives
from serl_chunk_robot.server.processes import Processes
from serl_chunk_robot.server.streams import device_children

SPEC = RobotSpec("arms", 1 / TICK, J, tuple(LOW), tuple(HIGH), tuple(range(J)), GRIPPERS, (), 500, ((0, 7), (7, 14)))

PATIENCE = 0.8  # s in place of RENEWED: machines that run tests may stand still for longer than robot PCs may
LEADER = '''
import time
from pathlib import Path

import numpy as np

from serl_chunk_robot.devices import leader_motion, polling
from serl_chunk_robot.devices.base import Sample
from serl_chunk_robot.devices.leader_motion import LeaderDrive
from serl_chunk_robot.devices.polling import PolledDevice


class Simulated(PolledDevice):
    """Seven joints. A file shows their torque, and its absence unplugs the leader.

    While a file "held" lies beside the leader, a hand holds it. For a file "away" the hand moves it away from its arm.
    """

    pause = 0.002

    def __init__(self, state):
        # Machines that run tests may stand still for longer than robot PCs may.
        leader_motion.VALID = polling.SILENT = leader_motion.STANDS = 0.5  # s
        self.state, self.joints, self.torque = Path(state), np.array(AWAY), False
        self.drive = LeaderDrive("simulated", self, 7)
        super().__init__("simulated")

    def _open(self):
        self.release()

    def _show(self, torque):
        self.torque, new = torque, self.state.with_suffix(".new")
        new.write_text(f"{torque:d} {self.joints[0]:.4f}")
        new.replace(self.state)  # no reader finds it empty

    def _look(self):
        if not self.state.exists():
            raise OSError("device not configured")
        if (hand := self.state.with_name("away")).exists():
            self.joints = np.array(AWAY)
            hand.unlink()
        return Sample(None, self.joints.copy(), (), time.monotonic(), True)

    def _release(self):
        if self.state.exists():
            self.release()

    def reach(self):
        return np.full(7, -3.0), np.full(7, 3.0)

    def hold(self, joints):
        self._show(True)

    def move(self, joints):
        if not self.state.with_name("held").exists():
            self.joints = joints.copy()
        self._show(True)

    def release(self):
        self._show(False)
'''


def robot_file(folder: Path) -> Path:
    away = HOME[7:] + 0.3 * (np.arange(7) < 6)  # of the joints, not of the gripper
    (folder / "leader.py").write_text(f"AWAY = {away.tolist()}\n{LEADER}")
    table = f'name = "right"\ndriver = "leader.py:Simulated"\nstate = "{folder / "state"}"\narm = 1'
    path = folder / "robot.toml"
    path.write_text(f'name = "cell"\ndriver = "fake"\nport = {free_port(3)}\n[[device]]\n{table}\n')
    return path


class LedRobot:
    """A served robot that is cleared, and a simulated leader of its right arm in a process."""

    def __init__(self, stack: contextlib.ExitStack, folder: Path) -> None:
        file = load(robot_file(folder))
        stack.enter_context(patch("serl_chunk_robot.server.leader_permissions.RENEWED", PATIENCE))
        self.state, listed = folder / "state", tuple((d.name, d.port, d.arm) for d in file.devices)
        drives = stack.enter_context(contextlib.closing(Drives(["right"], file.profiles[CAUTIOUS].limits)))
        self.robot = stack.enter_context(served(port=file.port, devices=listed, drives=drives, dt=TICK))
        children = device_children(file.devices, HERE, None, self.robot.server.run_id, drives.descriptors())
        self.processes = stack.enter_context(Processes(children))
        self.operator = self.robot.ready()

    def torque(self) -> bool:
        return self.state.exists() and self.state.read_text().startswith("1")

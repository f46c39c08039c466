"""A simulated leader that can be driven, in a process of its own, and a served robot whose right arm it leads."""

from __future__ import annotations

import contextlib
from pathlib import Path
from unittest.mock import patch

from robot_limits import GRIPPERS, HIGH, LOW, J
from robot_served import HERE, free_port, served
from robot_world import TICK

from serl_chunk.config.experiment import ActorConfig, ExperimentConfig
from serl_chunk.config.operator import DeviceConfig
from serl_chunk.config.robots import FakeAlohaConfig
from serl_chunk.devices.operator import make_human
from serl_chunk.robots.served.robot import ServedRobot
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
    """Seven joints. A file shows their torque, and its absence unplugs the leader."""

    pause = 0.002

    def __init__(self, state, away=0.5, held=False, plain=False):
        # Machines that run tests may stand still for longer than robot PCs may.
        leader_motion.VALID = polling.SILENT = 0.5  # s
        self.state, self.joints, self.torque, self.held = Path(state), np.full(7, away), False, held
        self.joints[6] = 0.5
        self.drive = None if plain else LeaderDrive("simulated", self, 7)
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
        return Sample(None, self.joints.copy(), (), time.monotonic(), True)

    def _release(self):
        if self.state.exists():
            self.release()

    def reach(self):
        return np.full(7, -3.0), np.full(7, 3.0)

    def hold(self, joints):
        self._show(True)

    def move(self, joints):
        if not self.held:
            self.joints = joints.copy()
        self._show(True)

    def release(self):
        self._show(False)
'''


def robot_file(folder: Path, more: str = "", port: int = 0) -> Path:
    (folder / "leader.py").write_text(LEADER)
    table = f'name = "right"\ndriver = "leader.py:Simulated"\nstate = "{folder / "state"}"\narm = 1\n{more}'
    path = folder / "robot.toml"
    path.write_text(f'name = "cell"\ndriver = "fake"\nport = {port or free_port(3)}\n[[device]]\n{table}\n')
    return path


class LedRobot:
    """A served robot that is cleared, and a simulated leader of its right arm in a process."""

    def __init__(self, stack: contextlib.ExitStack, folder: Path, more: str = "") -> None:
        file = load(robot_file(folder, more))
        stack.enter_context(patch("serl_chunk_robot.server.leader_permissions.RENEWED", PATIENCE))
        self.state, listed = folder / "state", tuple((d.name, d.port, d.arm) for d in file.devices)
        drives = stack.enter_context(contextlib.closing(Drives(["right"], file.profiles[CAUTIOUS].limits)))
        self.robot = stack.enter_context(served(port=file.port, devices=listed, drives=drives))
        children = device_children(file.devices, HERE, None, self.robot.server.run_id, drives.descriptors())
        self.processes = stack.enter_context(Processes(children))
        self.operator = self.robot.ready()

    def torque(self) -> bool:
        return self.state.exists() and self.state.read_text().startswith("1")


class Served(LedRobot):
    def __init__(self, stack: contextlib.ExitStack, folder: Path, more: str = "") -> None:
        super().__init__(stack, folder, more)
        stack.enter_context(patch("serl_chunk_robot.devices.polling.SILENT", 1.0))  # of readings at the actor
        self.config = FakeAlohaConfig(server=f"{HERE}:{self.robot.port}")
        self.env = stack.enter_context(contextlib.closing(ServedRobot(self.config, SPEC)))


def human_of(stack, cell, config=None, env=None, **device):
    config = ExperimentConfig("x", config or cell.config, actor=ActorConfig(intervention="leader"),
                              device=DeviceConfig(align="drive", **device))  # fmt: skip
    human = make_human(config, env or cell.env)
    stack.callback(human.close)
    return human

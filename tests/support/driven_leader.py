"""A simulated leader that can be driven, as the device of a robot's file, in a process of its own."""

from __future__ import annotations

from pathlib import Path

from robot_served import free_port

LEADER = '''
import time
from pathlib import Path

import numpy as np

from serl_chunk_robot.devices import drive
from serl_chunk_robot.devices.base import Sample
from serl_chunk_robot.devices.drive import LeaderDrive
from serl_chunk_robot.devices.polled import PolledDevice


class Simulated(PolledDevice):
    """Seven joints. A file shows their torque, and its absence unplugs the leader."""

    pause = 0.002

    def __init__(self, state, away=0.5, held=False, plain=False):
        drive.VALID = 0.3  # s: machines that run tests may stand still for longer than robot PCs may
        self.state, self.joints, self.torque, self.held = Path(state), np.full(7, away), False, held
        self.joints[6] = 0.5
        self.drive = None if plain else LeaderDrive("simulated", self, 7)
        super().__init__("simulated")

    def _open(self):
        self.torque = False
        self._show()

    def _show(self):
        new = self.state.with_suffix(".new")
        new.write_text(f"{self.torque:d} {self.joints[0]:.4f}")
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
        self.torque = True
        self._show()

    def move(self, joints):
        if not self.held:
            self.joints = joints.copy()
        self._show()

    def release(self):
        self.torque = False
        self._show()
'''


def robot_file(folder: Path, more: str = "", port: int = 0) -> Path:
    (folder / "leader.py").write_text(LEADER)
    table = f'name = "right"\ndriver = "leader.py:Simulated"\nstate = "{folder / "state"}"\narm = 1\n{more}'
    path = folder / "robot.toml"
    path.write_text(f'name = "cell"\ndriver = "fake"\nport = {port or free_port(3)}\n[[device]]\n{table}\n')
    return path

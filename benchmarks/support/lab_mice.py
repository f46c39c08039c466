"""Hands of the rehearsal's operator on two virtual SpaceMice, one for each arm of an ALOHA."""

from __future__ import annotations

import socket
from pathlib import Path

import numpy as np

from serl_chunk_robot.client.client import RobotClient
from support.lab_experiment import LabTask
from support.lab_operator import Meeting
from support.simulated_operator import SimulatedOperator
from support.virtual_mice import NAMES, SOCKET, MouseReports, fake_hid, frame, frames

TRANSLATION, ROTATION = 0.3, 1.5  # m/s and rad/s at full deflection: `device.translation` and `device.rotation`
TOUCHED = (fake_hid.translation(), fake_hid.rotation(), fake_hid.buttons(0))  # a mouse that is touched and let go
NO_CUBE = np.zeros(7)


class MouseHands:
    """See `lab_operator.Hands`. Args: folder of the virtual mice (`virtual_mice`)."""

    def __init__(self, folder: Path, task: LabTask, meeting: Meeting, seed: int) -> None:
        self.meeting, self._path = meeting, str(folder / SOCKET)
        self._human = SimulatedOperator(task.arms, meeting, translation=TRANSLATION, rotation=ROTATION, seed=seed)
        self._mice, self._reports = socket.socket(socket.AF_UNIX), [MouseReports(), MouseReports()]

    @staticmethod
    def program(folder: Path) -> tuple[str, ...]:
        """Return what Python runs in place of serl_chunk."""
        return (str(Path(__file__).with_name("virtual_mice.py")), str(folder))

    @staticmethod
    def flags(folder: Path, command: str) -> list[str]:
        paths = ",".join(str(folder / name) for name in NAMES)
        return ["--config.actor.intervention=spacemouse", f"--config.device.paths={paths}",
                f"--config.device.translation={TRANSLATION}", f"--config.device.rotation={ROTATION}"]  # fmt: skip

    def ready(self) -> bool:
        return not self._mice.connect_ex(self._path)

    def see(self, now: float, joints: np.ndarray, ready: bool) -> None:
        self._human.see(now, joints, NO_CUBE, ready)

    def move(self, now: float, robot: RobotClient) -> None:
        self._mice.sendall(frames(self._reports, self._human.hands(now)))

    def let_go(self) -> None:
        """A stalled actor drops reports, also the last one of a rest."""
        self._mice.sendall(b"".join(frame(k, report) for k in (0, 1) for report in TOUCHED))

    def close(self) -> None:
        self._mice.close()

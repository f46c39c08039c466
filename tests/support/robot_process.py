"""A robot's server as a process, who watches it, and a process at a terminal that moves its robot."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
from robot_served import HERE, Reading, free_port
from terminals import OperatedProcess

from serl_chunk_robot.client.client import RobotClient

# Machines that run tests may stand still for longer than robot PCs may.
MAIN = """
from serl_chunk_robot import main
from serl_chunk_robot.control import loop
from serl_chunk_robot.safety import measured, watchdog
from serl_chunk_robot.server import leases
loop.GAP, measured.STALE, watchdog.LEAST_VALIDITY = {gap}, 1.0, 0.5
watchdog.SILENCE, leases.SILENCE = 2.0, 4.0  # as in the product: the lease's is beyond the watchdog's
raise SystemExit(main.main())
"""
FILES = Path(__file__).resolve().parents[2] / "experiments" / "robots"


class RobotProcess:
    """A robot's file, with a port before its text, and the process that serves it.

    `log`: for what it prints; `gap`: seconds for which its loop may stand still; `ports`: consecutive ones.
    """

    def __init__(
        self, folder: Path, file: str, *, log: Path | None = None, gap: float = 1.0, ports: int = 3,
        environment: Mapping[str, str] = os.environ,
    ) -> None:  # fmt: skip
        self.port, self.file, self.log = free_port(ports), folder / "robot.toml", log or folder / "server.log"
        self.address = f"{HERE}:{self.port}"
        self.file.write_text(f"port = {self.port}\n{file}")
        self.environment = {**environment, "XDG_STATE_HOME": str(self.log.parent), "PYTHONUNBUFFERED": "1"}
        self._command = [sys.executable, "-c", MAIN.format(gap=gap)]
        self.process: subprocess.Popen[bytes] | None = None

    def begin(self, *more: str) -> None:
        """Serve the robot, and wait until it is published."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self._command, "serve", str(self.file), *more], env=self.environment, stderr=log, cwd=self.log.parent
            )
        with self.client("watcher", "any") as client:
            client.next_state(60)

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self._command, *words], env=self.environment, capture_output=True, text=True, timeout=60, check=False
        )

    def client(self, name: str, role: str) -> RobotClient:
        return Reading(self.address, name=name, role=role, answer=20.0)

    def end(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        assert self.process is not None
        process, self.process = self.process, None
        process.send_signal(number)
        return process.wait(30), self.log.read_text()

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


class WatchedRobot(RobotProcess):
    """One that is watched, with a process at a terminal, `desk`, that moves it."""

    desk: OperatedProcess

    @contextlib.contextmanager
    def watched(self) -> Iterator[WatchedRobot]:
        """Serve and watch the robot in the block."""
        with contextlib.closing(self):
            self.begin()
            with RobotClient(self.address, name="watcher", answer=20.0) as self._watcher:
                self._watcher.next_state(60)
                yield self
                self.end()

    def flags(self) -> list[str]:
        return [f"--config.robot.server={self.address}", "--config.actor.clock=realtime"]

    def state(self) -> str:
        state = self._watcher.newest_state() or {}
        return f"{state.get('state')}: {state.get('word')}"

    def until(self, condition: Callable[[], bool], what: str) -> None:
        ends = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < ends, f"{what}: {self.state()} {self.desk.output[-3000:]}"
            time.sleep(0.02)

    def becomes(self, state: str) -> None:
        self.until(lambda: self.state().startswith(state), f"never {state}")

    def moved(self, seconds: float, state: str = "") -> float:
        """Watch it, and that it stays in a state; returns the largest change of a joint's set point, rad."""
        ends, places = time.monotonic() + seconds, []
        while time.monotonic() < ends:
            assert self.state().startswith(state), f"{self.state()} {self.desk.output[-600:]}"
            places.append(self._watcher.newest_state()["set_point"])
            time.sleep(0.02)
        return float(np.ptp(np.stack(places), axis=0).max())

    def shows(self, text: str) -> None:
        self.until(lambda: text in self.desk.output, f"never shown: {text}")

    def press(self, keys: bytes) -> None:
        for key in keys:
            self.desk.type(bytes([key]))
            time.sleep(0.4)

    def first_episode(self) -> None:
        """Clear, let go and confirm until the policy moves it. A key that meets a change of the state does nothing."""
        self.shows("STOPPED")
        ends = time.monotonic() + 120
        while not self.state().startswith("RUN"):
            assert time.monotonic() < ends, f"never RUN: {self.state()} {self.desk.output[-3000:]}"
            self.press(b"c\r" if self.state().startswith("STOPPED") else b"\r")
            time.sleep(2)


def fake_aloha(**changes: object) -> str:
    """The file of the simulated arms that is shipped; `changes` are further keys of it."""
    return "".join(f"{key} = {value}\n" for key, value in changes.items()) + (FILES / "fake_aloha.toml").read_text()

"""A simulated robot behind a server of its own process, and an operator that clears it after every stop."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from serl_chunk_robot.client.client import RobotClient, RobotError
from support.ports import free_port
from support.robot_moments import press_on

ROBOTS = Path(__file__).resolve().parents[2] / "experiments" / "robots"
STARTS_WITHIN = 120.0  # s
LOOKS_FOR = 0.5  # s that the operator takes before clearing


class ServedRobotProcess:
    """Serves a robot's file; a context manager.

    Args:
        file: robot.toml; the ports of its server and its simulation are replaced by free ones.
        driver: options of the driver, written under [driver].
        clears: whether its operator clears it; else another one does.
    """

    def __init__(self, file: Path, driver: dict[str, Any] | None = None, *, clears: bool = True) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.port = free_port()
        text = file.read_text().replace("port = 5610", f"port = {free_port()}\nends = 20.0")
        for name, value in (driver or {}).items():
            text = _with_option(text, name, value)
        self.file = Path(self._folder.name) / file.name
        self.file.write_text(f"port = {self.port}\n{text}")
        self.stops: Counter[str] = Counter()  # by the word of the state
        self.late: dict[str, float] = {}
        self.counts: dict[str, int] = {}
        self._clears, self._ended = clears, threading.Event()
        self._operator = threading.Thread(target=self._operate, daemon=True)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> ServedRobotProcess:
        environment = {**os.environ, "XDG_STATE_HOME": self._folder.name}
        command = [sys.executable, "-m", "serl_chunk", "robot", "serve", str(self.file)]
        self._log = open(Path(self._folder.name) / "log", "w+")
        self._process = subprocess.Popen(
            command, env=environment, stderr=self._log, start_new_session=True, preexec_fn=end_with_parent
        )
        with RobotClient(self.address, name="start", answer=5.0) as client:
            ends = time.monotonic() + STARTS_WITHIN
            while client.newest_state() is None:
                if self._process.poll() is not None or time.monotonic() > ends:
                    self._log.seek(0)
                    raise SystemExit(f"{self.file.name} is not served: {self._log.read().strip()[-500:]}")
                time.sleep(0.05)
        self._operator.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._operator.join()
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._log.close()
        self._folder.cleanup()

    def figures(self) -> dict[str, Any]:
        """Return what the server did: lateness in ms, the gate's counts, and stops by reason."""
        late = {f"late_{name}_ms": 1e3 * value for name, value in self.late.items()}
        return {**late, "counts": self.counts, "stops": dict(self.stops)}

    def _operate(self) -> None:
        with RobotClient(self.address, name="benchmark", role="operator", answer=5.0) as client:
            stopped = False
            while not self._ended.wait(0.1):
                with contextlib.suppress(RobotError):
                    client.request("ping")
                    state = client.next_state(5.0)
                    self.late, self.counts = state["late"], state["counts"]
                    was, stopped = stopped, state["state"] == "STOPPED"
                    if stopped and not was and "started" not in state["word"]:
                        self.stops[state["word"]] += 1
                    if self._clears and state["state"] in ("STOPPED", "HELD"):
                        time.sleep(LOOKS_FOR)
                        press_on(client, state)


def end_with_parent() -> None:
    """Let a process end when the benchmark is killed (Linux)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _with_option(text: str, name: str, value: Any) -> str:
    """Return a robot's file whose [driver] has one option more, or another value of it."""
    shown = {True: "true", False: "false"}.get(value, repr(value)) if isinstance(value, bool) else repr(value)
    lines = [line for line in text.splitlines() if not line.startswith(f"{name} =")]
    if "[driver]" not in lines:
        i = next(i for i, line in enumerate(lines) if line.startswith("driver ="))
        plain = lines.pop(i).partition("=")[2].partition("#")[0].strip()
        table = lines.index("[[reset.step]]") if "[[reset.step]]" in lines else len(lines)
        lines[table:table] = ["[driver]", f"name = {plain}", ""]
    lines.insert(lines.index("[driver]") + 1, f"{name} = {shown}")
    return "\n".join(lines) + "\n"

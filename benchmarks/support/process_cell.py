"""A served robot whose driver hangs, exits and lies on demand, for `benchmarks/robot_processes.py`."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from serl_chunk_robot.client.client import RobotError
from serl_chunk_robot.drivers.fake import HOME
from support.ports import free_port
from support.robot_moments import DRIVER, HERE, Cell

ACTOR = Path(__file__).with_name("process_actor.py")
HANGS_FOR = 1.0  # s
BEGINS, ENDS, STOP = 0.0, 1.0, 2.0  # of a driver's fault, and a call of its stop
FAULTY = (
    DRIVER
    + f'''
import ctypes, os

def with_the_lock(seconds):
    """Stand still with the interpreter's lock."""
    libc, mutex, ends = ctypes.PyDLL(None), ctypes.create_string_buffer(64), time.time() + seconds
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_timedlock(mutex, (ctypes.c_long * 2)(int(ends), int(1e9 * (ends % 1))))

class Faulty(Logged):
    """Does what a file says, "read sleep" or "command exit", and appends when, and each stop, to another one."""

    def __init__(self, log):
        super().__init__(log)
        self._wanted, self._calls = log + ".fault", open(log + ".calls", "ab", buffering=0)

    def _note(self, what):
        self._calls.write(struct.pack("<2d", time.monotonic(), what))

    def _fault(self, call):
        if not os.path.exists(self._wanted):
            return ""
        where, kind = open(self._wanted).read().split()
        if where != call:
            return ""
        self._note({BEGINS})
        if kind in ("place", "torque"):  # for as long as the file is there
            return kind
        os.unlink(self._wanted)
        if kind == "exit":
            raise SystemExit("a library ends the process")
        (time.sleep if kind == "sleep" else with_the_lock)({HANGS_FOR})
        self._note({ENDS})
        return ""

    def read(self):
        kind, made = self._fault("read"), super().read()
        if kind == "torque":
            return made._replace(torque=np.array([True, False]))
        return made._replace(q=made.q + 0.5) if kind == "place" else made

    def command(self, target, dt):
        super().command(target, dt)
        self._fault("command")

    def stop(self, reason, level=0):
        self._note({STOP})
        return super().stop(reason, level)
'''
)
AWAY = 0.4  # rad from home, of a reset's steps


class ProcessCell(Cell):
    """A served robot that needs go, and an actor of `process_actor.py`."""

    def __init__(self, folder: Path) -> None:
        port = free_port()
        super().__init__(folder, (port, port + 2), 1, os.environ, server=("-m", "serl_chunk_robot"))
        (folder / "faulty.py").write_text(FAULTY)
        away = [home + AWAY * (joint % 7 != 6) for joint, home in enumerate(HOME * 2)]
        steps = [f"[[reset.step]]\njoints = {joints}\nspeed = 0.3\n" for joints in (away, list(HOME * 2))]
        (folder / "robot.toml").write_text(
            f'name = "processes"\nstart = "evaluating"\nport = {port}\n{"".join(steps)}'
            f'[driver]\nname = "faulty.py:Faulty"\nlog = "{self._log}"\n'
        )
        self._sent = folder / "sent"
        self.start()
        self.server = self._processes[0]

    def act_as(self, kind: str) -> None:
        """Start an actor of a kind, the first or the next one."""
        self.actor = self._start("actor", [str(ACTOR), f"{HERE}:{self._port}", str(self._sent), kind])

    def sent(self) -> np.ndarray:
        """The moments at which actors sent commands, float64[N]."""
        return np.fromfile(self._sent, np.float64)

    def fault(self, what: str = "") -> None:
        """Let the driver do something once or, until the next call, again and again; empty: nothing any more."""
        wanted = Path(f"{self._log}.fault")
        if what:
            wanted.with_suffix(".new").write_text(what)
            wanted.with_suffix(".new").rename(wanted)
        else:
            wanted.unlink(missing_ok=True)

    def called(self, what: float, since: float) -> float:
        """When the driver first noted something after a moment; NaN where it did not."""
        calls = np.fromfile(f"{self._log}.calls", np.float64).reshape(-1, 2)
        return float(next(iter(calls[(calls[:, 1] == what) & (calls[:, 0] >= since), 0]), np.nan))

    def front(self) -> int:
        """The process of the front, which any thread of the server may have started; 0 while there is none."""
        for children in Path(f"/proc/{self.server.pid}/task").glob("*/children"):
            for child in children.read_text().split():
                with contextlib.suppress(OSError):
                    if b"server.front" in Path(f"/proc/{child}/cmdline").read_bytes():
                        return int(child)
        return 0

    def collect(self, names: tuple[str, ...], seconds: float = 10.0) -> list[dict[str, Any]]:
        """Return the states until one of these names has come, or those of so many seconds."""
        ends, found = time.monotonic() + seconds, self.watch(0.02)
        while time.monotonic() < ends and not any(state["state"] in names for state in found):
            found += self.watch(0.02)
        return found

    def press(self, op: str, seconds: float = 10.0) -> None:
        """Request clear or go of the robot as it is shown, until it is done."""
        ends = time.monotonic() + seconds
        while True:
            state = self.operator.next_state(seconds)
            lease = {name: state[name] for name in ("controller", "process")} if op == "go" else {}
            try:
                self.operator.request(op, generation=state["generation"], **lease)
                return
            except RobotError as e:
                self._check(ends, f"{op}: {e}")
            time.sleep(0.05)

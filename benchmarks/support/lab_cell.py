"""The processes of the rehearsal (`lab.py`): the robot's server, and commands on terminals, each with an operator."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import numpy as np

HERE = Path(__file__).resolve().parent
TESTS = HERE.parents[1] / "tests" / "support"
sys.path[:0] = [str(TESTS), str(HERE)]
# All processes of a rehearsal may import what this one may.
_paths = (str(HERE.parent), str(TESTS), os.environ.get("PYTHONPATH", ""))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, _paths))
from processes import Process  # noqa: E402
from ptys import Pty  # noqa: E402
from robot_day import Day  # noqa: E402
from robot_served import HERE as LOCALHOST  # noqa: E402

from support.lab_operator import LabOperator, Meeting  # noqa: E402
from support.lab_robots import LabRobot  # noqa: E402

EXPERIMENT = HERE / "lab_experiment.py"
COLUMNS, ROWS = 110, 40
SAYS = 20.0  # s between lines of progress
# The terminal becomes the controlling one, as a shell's is.
_OWN_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)


class Terminal(Process):
    """A `serl-chunk` command on a terminal of its own. `program`: what Python runs."""

    def __init__(
        self, program: Sequence[str], words: Sequence[str], log: Path, environment: Mapping[str, str], cwd: Path
    ) -> None:
        self.program = program
        super().__init__(words, log, environment, cwd=cwd)

    def _start(self, file: IO[bytes], environment: Mapping[str, str], cwd: Path | None) -> subprocess.Popen[bytes]:
        self.pty = Pty(COLUMNS, ROWS)
        self.pty.look()
        return subprocess.Popen(
            [sys.executable, "-c", _OWN_TERMINAL, *self.command],
            stdin=self.pty.slave, stdout=self.pty.slave, stderr=self.pty.slave, env=dict(environment), cwd=cwd,
            start_new_session=True,
        )  # fmt: skip

    @property
    def screen(self) -> str:
        return "\n".join(self.pty.picture.shown())

    @property
    def output(self) -> str:
        """All lines so far, as they stood on the screen."""
        return "\n".join([*self.pty.picture.above, *self.pty.picture.shown()])

    def type(self, data: bytes) -> None:
        self.pty.type(data)

    def close(self) -> None:
        """End it, and write its lines to the log."""
        super().close()
        if self.pty.master >= 0:
            time.sleep(0.1)  # for what it wrote last
            self._log.write_text(self.output + "\n")
            self.pty.close()


class Lab(Day):
    """The processes of one rehearsal in a folder. An operator at a terminal clears the robot; see `Day`."""

    def __init__(self, folder: Path, robot: LabRobot) -> None:
        super().__init__(folder, f"{EXPERIMENT}:{robot.name}", clears=False)
        self.kind, self.address = robot, f"{LOCALHOST}:{self.port}"
        self.devices = Path(tempfile.mkdtemp(prefix="lab_"))  # a socket's path has to be short
        self.log = folder / "server.log"
        robot.write(self.file, LOCALHOST, self.port)
        self._within = contextlib.ExitStack()
        self._seed, self._said = 0, time.monotonic()

    def serve(self) -> None:
        """Start what the robot's server needs, then see `Day`."""
        self.serving.update(self.kind.begin(self._within, self.folder, self.devices))
        super().serve()

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """As `Day.wait`, with the newest process's last line every so often."""

        def looked() -> bool:
            if (now := time.monotonic()) - self._said > SAYS and self._started:
                self._said, newest = now, self._started[-1]
                # What a terminal shows begins with what goes on; a log ends with it.
                text = newest.screen if isinstance(newest, Terminal) else newest.output
                lines = [*filter(None, map(str.strip, text.splitlines()))]
                shown = lines[0 if isinstance(newest, Terminal) else -1] if lines else ""
                print(f"  ... {shown[:COLUMNS]}", flush=True)
            return condition()

        super().wait(looked, what)

    def judge_by(self, classifier: Path) -> None:
        """Let a classifier decide on success from now on."""
        self.flags[self.flags.index("--exp_name") + 1] += f":{classifier}"

    @contextlib.contextmanager
    def operated(self, choose: Callable[[], str], *words: str) -> Iterator[tuple[Terminal, LabOperator]]:
        """Run a command at a terminal, with an operator; it is ended at the end."""
        robot, self._seed, self.log = self.kind, self._seed + 1, self.new_log()
        environment = {**self.environment, "TERM": "xterm-256color"}
        words = (*words, *robot.hands.flags(self.devices, words[0]))
        terminal = Terminal(robot.hands.program(self.devices), words, self.log, environment, self.folder)
        self.add(terminal)
        meeting = Meeting(robot.task, choose, np.random.default_rng(self._seed))
        hands = robot.hands(self.devices, robot.task, meeting, self._seed)
        operator = LabOperator(self.address, robot.task, terminal, hands)
        try:
            yield terminal, operator
        finally:
            operator.close()
            terminal.close()
            if operator.error is not None:
                raise operator.error

    def run_here(self, *words: str) -> str:
        """Run a command that needs no terminal to its end; returns its output."""
        self.log = self.new_log()
        return self.ends(self.start(*words))

    def close(self) -> None:
        super().close()
        self._within.close()
        shutil.rmtree(self.devices, ignore_errors=True)

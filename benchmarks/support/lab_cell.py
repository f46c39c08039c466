"""The processes of the rehearsal (`lab.py`): commands on terminals with two virtual SpaceMice, and the robot's file."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO

from support.lab_arms import lab_arms
from support.lab_camera import LabCamera
from support.lab_experiment import CAMERA, IMAGE_SIZE
from support.lab_operator import ROTATION, TRANSLATION, LabOperator
from support.virtual_mice import NAMES

HERE = Path(__file__).resolve().parent
TESTS = HERE.parents[1] / "tests" / "support"
sys.path[:0] = [str(TESTS), str(HERE)]
import ros1  # noqa: E402, F401 (of scripts that import this)
from processes import Process  # noqa: E402
from ptys import Pty  # noqa: E402
from robot_day import ROOT, Day  # noqa: E402
from robot_served import HERE as LOCALHOST  # noqa: E402

EXPERIMENT = HERE / "lab_experiment.py"
COLUMNS, ROWS = 110, 40
SAYS = 20.0  # s between lines of progress
ROS, FAKE = "aloha_ros1", "fake"
# The terminal becomes the controlling one, as a shell's is.
_OWN_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)


class Terminal(Process):
    """A `serl-chunk` command on a terminal of its own, with the virtual mice of a folder."""

    def __init__(self, words: list[str], log: Path, environment: Mapping[str, str], mice: Path, cwd: Path) -> None:
        self.program = (str(HERE / "virtual_mice.py"), str(mice))
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
    """The processes of one rehearsal in a folder. An operator at a terminal clears the robot; see `Day`.

    Args:
        driver: of the robot, `ROS` or `FAKE`.
    """

    def __init__(self, folder: Path, driver: str) -> None:
        super().__init__(folder, str(EXPERIMENT), clears=False)
        self.address = f"{LOCALHOST}:{self.port}"
        self.mice = Path(tempfile.mkdtemp(prefix="lab_"))  # a socket's path has to be short
        self.log = folder / "server.log"
        self.file.write_text(robot_file(self.port, driver))
        self._seed, self._said = 0, time.monotonic()

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
        self.flags[self.flags.index("--exp_name") + 1] = f"{EXPERIMENT}:{classifier}"

    @contextlib.contextmanager
    def operated(self, choose: Callable[[], str], *words: str) -> Iterator[tuple[Terminal, LabOperator]]:
        """Run a command at a terminal, with an operator; it is ended at the end."""
        words = (*words, "--config.actor.intervention=spacemouse",
                 f"--config.device.paths={','.join(str(self.mice / name) for name in NAMES)}",
                 f"--config.device.translation={TRANSLATION}", f"--config.device.rotation={ROTATION}")  # fmt: skip
        paths = os.pathsep.join(filter(None, [str(TESTS), self.environment.get("PYTHONPATH", "")]))
        environment = {**self.environment, "PYTHONPATH": paths, "TERM": "xterm-256color"}
        self.log, self._seed = self.new_log(), self._seed + 1
        terminal = Terminal([*words], self.log, environment, self.mice, self.folder)
        self.add(terminal)
        operator = LabOperator(self.address, self.mice, terminal, choose, self._seed)
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
        for path in self.mice.iterdir():
            path.unlink()
        self.mice.rmdir()


def robot_file(port: int, driver: str) -> str:
    """Return the file that is shipped, with one drawn camera, starts that differ, and resets that take less time."""
    text = (ROOT / "experiments/robots/aloha_ros1.toml").read_text()
    text = text.replace('start = "first_day"', f'port = {port}\nstart = "exploring"', 1)
    text = text[: text.index("[[camera]]")] + "\n".join((
        "[[camera]]", f'name = "{CAMERA}"', f'driver = "{HERE / "lab_camera.py"}:{LabCamera.__name__}"',
        f'server = "{LOCALHOST}:{port}"', f"size = {IMAGE_SIZE}", "rate = 20", "",
    ))  # fmt: skip
    text = text.replace("gripper = 1.0\n", "gripper = 1.0\nspeed = 1.0\n")
    # A set point that a late pass leads further moves these arms at once: they have no mass.
    text = text.replace("[profile.exploring]", "[profile.exploring]\noverspeed = 30.0")
    starts = [0.3, 0.2, *[0.0] * 5] * 2
    text = text.replace("# random = 0.05 ", f"speed = 1.0\nrandom = {starts} # ")
    if driver == FAKE:
        name = f"{HERE / 'lab_arms.py'}:{lab_arms.__name__}"
        text = re.sub(r"\[driver\]\n(?s:.*?)\n\n", f'[driver]\nname = "{name}"\n\n', text, count=1)
    return text

"""`serl-chunk record --policy human` of a served robot at a terminal: keys in, episodes out. A script is the human."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ptys import Pty, wait_until
from robot_process import RobotProcess, fake_aloha

from serl_chunk.console.bindings import REPEAT
from serl_chunk.data.formats.hdf5 import read_episode
from serl_chunk.types import Outcome, Source

PATIENCE = 120.0
# The terminal becomes the controlling one, as a shell's is.
OWN_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)


class Desk:
    """A robot's server, a terminal, and the command at it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.robot = folder, RobotProcess(folder, fake_aloha(), gap=2.0)
        self.robot.begin()
        self.pty = Pty(120, 40)
        self.before = self.pty.attributes()
        self.pty.look()
        self.command: subprocess.Popen[bytes] | None = None

    def start(self, *words: str) -> None:
        self.command = subprocess.Popen(
            [sys.executable, "-c", OWN_TERMINAL, sys.executable, "-m", "serl_chunk", *words,
             f"--config.robot.server={self.robot.address}"],
            stdin=self.pty.slave, stdout=self.pty.slave, stderr=self.pty.slave, start_new_session=True, cwd=self.folder,
            env={**self.robot.environment, "JAX_PLATFORMS": "cpu", "TERM": "xterm"},
        )  # fmt: skip

    @property
    def screen(self) -> str:
        return "\n".join(self.pty.picture.shown())

    def shows(self, text: str) -> None:
        assert wait_until(lambda: re.search(text, self.screen), PATIENCE), f"no {text!r} in\n{self.screen}"

    def prints(self, text: str) -> None:
        """Wait for a line of the log."""
        assert wait_until(lambda: text in self.pty.picture.written, PATIENCE), f"no {text!r} in\n{self.screen}"

    def acts(self) -> None:
        """Wait until an episode runs, and the human has moved the robot."""
        self.shows("The robot moves in")
        assert wait_until(lambda: "moves in" not in self.screen and "1 success" in self.screen, PATIENCE)
        time.sleep(1.2)

    def close(self) -> None:
        if self.command is not None:
            self.command.kill()
            self.command.wait()
        self.robot.close()
        self.pty.close()


@pytest.fixture
def desk(tmp_path) -> Iterator[Desk]:
    with contextlib.closing(Desk(tmp_path)) as desk:
        yield desk


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_demonstrations_are_recorded_discarded_and_repeated_by_keys(desk):
    words = ["record", "--exp_name", "fake_aloha", "--policy", "human", "--n_demos", "2", "--out", "demos"]
    desk.start(*words, "--config.actor.intervention=scripted", "--config.robot.max_episode_steps=1000")
    desk.shows("the robot is STOPPED")  # as after each start of a server
    desk.pty.type(b"c")
    desk.shows("clear the stop")
    desk.pty.type(b"\r")
    desk.shows("Enter go")
    time.sleep(2 * REPEAT)  # else it counts as a repeat of the Enter before
    desk.pty.type(b"\r")
    desk.shows("the scene is not confirmed")
    desk.pty.type(b"\r")
    desk.acts()
    desk.pty.type(b"s")
    desk.prints("demonstration 1 of 2: ")
    desk.acts()
    desk.pty.type(b"\x7f")
    desk.prints(", discarded")
    desk.shows("demonstration 2 of 2: 2 attempts, 1 kept")
    desk.acts()
    desk.pty.type(b" ")
    desk.shows("Enter go")
    desk.pty.type(b"r")
    desk.prints(", to be repeated")
    desk.acts()
    desk.pty.type(b"s")
    desk.prints("demonstration 2 of 2: ")
    assert desk.command.wait(PATIENCE) == 0
    files = sorted((desk.folder / "demos").iterdir())
    assert [file.name for file in files] == ["episode_0.hdf5", "episode_1.hdf5"]
    episodes = [read_episode(file) for file in files]
    assert [e.begin.init_state for e in episodes] == ["seed-0", "seed-2"]
    for e in episodes:
        assert (e.end.outcome, e.end.outcome_by, e.end.terminated) == (Outcome.SUCCESS, "operator", True)
        assert e.steps.source[0] == Source.HUMAN
    log = desk.robot.log.read_text()
    assert log.count("MOVE: resetting") == 4
    assert log.count("HELD: cleared") == log.count("lets serl_chunk move it") == 1
    assert wait_until(lambda: desk.pty.attributes() == desk.before)

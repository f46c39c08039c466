"""An operator at the terminal of a real actor, of a served robot: from keys to the journal and the server's log."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from live_desk import Viewer
from robot_served import HERE, free_port
from terminals import OperatedProcess

from serl_chunk.robots.fake.spec import HOME_JOINTS
from serl_chunk.runs.episodes import RunSource
from serl_chunk.types import Source
from serl_chunk_robot.client.client import RobotClient

# Machines that run tests may stand still for longer than robot PCs may.
SERVER = """
import sys
from serl_chunk_robot import main
from serl_chunk_robot.control import loop
from serl_chunk_robot.safety import watchdog
loop.GAP, watchdog.LEAST_VALIDITY = 1.0, 0.5
raise SystemExit(main.main(sys.argv[1:]))
"""
LONG = {"learner__max_steps": 1_000_000, "learner__warmup_episodes": 1_000, "robot__max_episode_steps": 1_000}
FILE = Path(__file__).parents[2] / "experiments" / "robots" / "fake_aloha.toml"


class Cell:
    """A watched robot, and the actor at a terminal."""

    def __init__(self, actor: OperatedProcess, watcher: RobotClient) -> None:
        self.actor, self._watcher = actor, watcher

    def until(self, condition: Callable[[], bool], what: str, seconds: float = 120.0) -> None:
        ends = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < ends, f"{what}: {self.state()} {self.actor.output[-3000:]}"
            time.sleep(0.02)

    def state(self) -> str:
        state = self._watcher.newest_state() or {}
        return f"{state.get('state')}: {state.get('word')}"

    def is_(self, state: str) -> None:
        self.until(lambda: self.state().startswith(state), f"never {state}")

    def runs(self) -> None:
        """Wait until the policy moves the robot. A server on a busy machine stops it where a command is late."""
        ends = time.monotonic() + 120
        while not self.state().startswith("RUN"):
            assert time.monotonic() < ends, f"never RUN: {self.state()} {self.actor.output[-3000:]}"
            if self.state().startswith("STOPPED"):
                self.press(b"c\r\r")  # cleared, it is HELD: the second Enter lets it go on
                time.sleep(3)
            time.sleep(0.02)

    def press(self, keys: bytes) -> None:
        for key in keys:
            self.actor.type(bytes([key]))
            time.sleep(0.4)


class Served(NamedTuple):
    """A robot's server, and the flags of processes that use it."""

    flags: list[str]
    watcher: RobotClient
    log: Path


@pytest.fixture
def served(tmp_path, environment) -> Iterator[Served]:
    port, file, log = free_port(2), tmp_path / "robot.toml", tmp_path / "server.txt"
    start = 'start = "evaluating"'
    file.write_text(FILE.read_text().replace(start, f"{start}\nport = {port}\npark = {[*HOME_JOINTS]}"))
    flags = [f"--config.robot.server={HERE}:{port}", "--config.actor.clock=realtime"]
    with log.open("w") as text, contextlib.ExitStack() as opened:
        server = subprocess.Popen(
            [sys.executable, "-c", SERVER, "serve", str(file)], stdout=text, stderr=text,
            env={**environment, "XDG_STATE_HOME": str(tmp_path)},
        )  # fmt: skip
        opened.callback(server.wait, 20)
        opened.callback(server.terminate)
        watcher = opened.enter_context(RobotClient(f"{HERE}:{port}", name="watcher", answer=20.0))
        watcher.next_state(60)
        yield Served(flags, watcher, log)


def actor_of(processes, served: Served, run: Path, *more: str) -> Cell:
    """A learner of the run folder `run`, and its actor at a terminal."""
    processes.learner(run, *served.flags, **LONG)
    actor = processes.start(
        *processes.flags(**LONG), "--actor", "--spool_path", str(run.parent / "spool"), *served.flags,
        "--config.operator.countdown_s=1", *more, kind=OperatedProcess,
    )  # fmt: skip
    return Cell(actor, served.watcher)


@pytest.mark.slow
def test_keys_at_the_terminal_of_a_served_robots_actor(tmp_path, served, processes):
    cell = actor_of(processes, served, tmp_path / "run")
    _session(cell)
    assert cell.actor.wait() == 0, cell.actor.output
    _check(RunSource(tmp_path / "run"), served.log.read_text())


@pytest.mark.slow
def test_a_closed_terminal_holds_the_robot_and_a_page_goes_on(tmp_path, served, processes):
    cell = actor_of(processes, served, tmp_path / "run", "--viewer", "0")
    _first_episode(cell)
    page = Viewer(re.search(r"live page: (http\S+)", cell.actor.output)[1], "a" * 24)
    with page.stream():  # it has control
        cell.actor.hang_up()
        _at_rest(cell, served)
        assert cell.actor.running
        assert cell.state().startswith("RUN")  # in its episode
        pressed = lambda: page.press("enter", "HOLD").status == 200 and not _stands(cell, served, 2.5)  # noqa: E731
        cell.until(pressed, "the page never went on")
        quits = lambda: not cell.actor.running or _press(page, "q") or _press(page, "q") or _press(page, "s")  # noqa: E731
        cell.until(quits, "the page never ended it")
        assert cell.actor.wait() == 0
    assert any(Source.HOLD in episode for episode in _sources(tmp_path / "run"))


@pytest.mark.slow
def test_a_closed_terminal_ends_an_actor_that_nothing_else_can_continue(tmp_path, served, processes):
    cell = actor_of(processes, served, tmp_path / "run")
    _first_episode(cell)
    cell.actor.hang_up()
    assert cell.actor.wait() == 128 + signal.SIGHUP
    cell.is_("HELD")  # by its server
    assert _stands(cell, served, 1.0)


def _first_episode(cell: Cell) -> None:
    """Go on until the policy moves the robot. A key that meets a change of the state does nothing."""
    cell.until(lambda: "STOPPED" in cell.actor.output, "never shown: STOPPED")
    ends = time.monotonic() + 120
    while not cell.state().startswith("RUN"):
        assert time.monotonic() < ends, f"never RUN: {cell.state()} {cell.actor.output[-3000:]}"
        cell.press(b"c\r" if cell.state().startswith("STOPPED") else b"\r")
        time.sleep(2)
    cell.runs()


def _press(page: Viewer, key: str) -> None:
    """Press a key in whatever state it is: a busy machine's server may have stopped the robot."""
    for word in ("POLICY", "HOLD", "STOPPED", "RESET", "WAITING"):
        with contextlib.suppress(OSError):  # the page has ended
            page.press(key, word)
    time.sleep(0.5)


def _stands(cell: Cell, served: Served, seconds: float) -> bool:
    """Whether no joint's set point changes for so long."""
    ends, places = time.monotonic() + seconds, []
    while time.monotonic() < ends:
        places.append(served.watcher.newest_state()["set_point"])
        time.sleep(0.02)
    return float(np.ptp(np.stack(places), axis=0).max()) < 1e-3


def _at_rest(cell: Cell, served: Served) -> None:
    time.sleep(1)
    assert _stands(cell, served, 2.0), cell.state()


def _sources(run: Path) -> list[set[int]]:
    source = RunSource(run)
    return [{int(s) for s in source.read(key).steps.source} for key in source.keys()]


def _session(cell: Cell) -> None:
    """All keys, in the order in which an operator may press them."""
    shows = lambda text: cell.until(lambda: text in cell.actor.output, f"never shown: {text}")  # noqa: E731
    shows("STOPPED")
    cell.press(b"c\r")
    cell.is_("HELD")
    cell.press(b"\r")  # the countdown, and the first reset
    shows("the scene is not confirmed")
    cell.press(b"r")
    time.sleep(3)
    cell.press(b"\r")
    cell.runs()
    cell.press(b" ")
    time.sleep(0.5)
    cell.press(b"\r")
    time.sleep(2)
    cell.press(b"s")
    for keys in (b"f", b"\x7f", b"u"):
        cell.runs()
        cell.press(keys)
    cell.runs()
    cell.press(b" g")
    cell.runs()
    cell.press(b" py")
    cell.until(lambda: "parking" in cell.state() or "the motion is done" in cell.state(), "not parked")
    time.sleep(3)
    cell.press(b"\r")
    cell.runs()
    cell.press(b"x")
    cell.is_("STOPPED")
    cell.press(b"c\r\r")
    cell.runs()
    cell.press(b"qqs")


def _check(source: RunSource, log: str) -> None:
    episodes = [source.read(key) for key in source.keys()]
    outcomes = {str(episode.end.outcome) for episode in episodes}
    assert {"success", "failure"} <= outcomes
    assert any((episode.steps.source == Source.HOLD).any() for episode in episodes)
    for word in ("resetting for", "parking for", "stopped by", "cleared by", "lets actor move it"):
        assert word in log, word

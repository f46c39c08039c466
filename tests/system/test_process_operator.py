"""An operator at the terminal of a real actor, of a served robot: from keys to the journal and the server's log."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_desk import Viewer
from robot_process import WatchedRobot, fake_aloha
from terminals import OperatedProcess

from serl_chunk.robots.fake.spec import HOME_JOINTS
from serl_chunk.runs.episodes import RunSource
from serl_chunk.types import Source

LONG = {"learner__max_steps": 1_000_000, "learner__warmup_episodes": 1_000, "robot__max_episode_steps": 1_000}


class Cell(WatchedRobot):
    def act(self, processes, run: Path, *more: str) -> None:
        processes.learner(run, *self.flags(), **LONG)
        self.desk = processes.start(
            *processes.flags(**LONG), "--actor", "--spool_path", str(run.parent / "spool"), *self.flags(),
            "--config.operator.countdown_s=1", *more, kind=OperatedProcess,
        )  # fmt: skip

    def runs(self) -> None:
        """Wait until the policy moves the robot. A server on a busy machine stops it where a command is late."""
        ends = time.monotonic() + 120
        while not self.state().startswith("RUN"):
            assert time.monotonic() < ends, f"never RUN: {self.state()} {self.desk.output[-3000:]}"
            if self.state().startswith("STOPPED"):
                self.press(b"c\r\r")  # cleared, it is HELD: the second Enter lets it go on
                time.sleep(3)
            time.sleep(0.02)

    def stands(self, seconds: float) -> bool:
        return self.moved(seconds) < 1e-3


@pytest.fixture
def cell(tmp_path, environment) -> Iterator[Cell]:
    with Cell(tmp_path, fake_aloha(park=[*HOME_JOINTS]), environment=environment).watched() as cell:
        yield cell


@pytest.mark.slow
def test_keys_at_the_terminal_of_a_served_robots_actor(tmp_path, cell, processes):
    cell.act(processes, tmp_path / "run")
    _session(cell)
    assert cell.desk.wait() == 0, cell.desk.output
    _check(RunSource(tmp_path / "run"), cell.log.read_text())


@pytest.mark.slow
def test_a_closed_terminal_holds_the_robot_and_a_page_goes_on(tmp_path, cell, processes):
    cell.act(processes, tmp_path / "run", "--viewer", "0")
    cell.first_episode()
    page = Viewer(re.search(r"live page: (http\S+)", cell.desk.output)[1], "a" * 24)
    with page.stream():  # it has control
        cell.desk.hang_up()
        time.sleep(1)
        assert cell.stands(2.0), cell.state()
        assert cell.desk.running
        assert cell.state().startswith("RUN")  # in its episode
        pressed = lambda: page.press("enter", "HOLD").status == 200 and not cell.stands(2.5)  # noqa: E731
        cell.until(pressed, "the page never went on")
        quits = lambda: not cell.desk.running or _press(page, "q") or _press(page, "q") or _press(page, "s")  # noqa: E731
        cell.until(quits, "the page never ended it")
        assert cell.desk.wait() == 0
    source = RunSource(tmp_path / "run")
    assert any((source.read(key).steps.source == Source.HOLD).any() for key in source.keys())


@pytest.mark.slow
def test_a_closed_terminal_ends_an_actor_that_nothing_else_can_continue(tmp_path, cell, processes):
    cell.act(processes, tmp_path / "run")
    cell.first_episode()
    cell.desk.hang_up()
    assert cell.desk.wait() == 128 + signal.SIGHUP
    cell.becomes("HELD")  # by its server
    assert cell.stands(1.0)


def _press(page: Viewer, key: str) -> None:
    """Press a key in whatever state it is: a busy machine's server may have stopped the robot."""
    for word in ("POLICY", "HOLD", "STOPPED", "RESET", "WAITING"):
        with contextlib.suppress(OSError):  # the page has ended
            page.press(key, word)
    time.sleep(0.5)


def _session(cell: Cell) -> None:
    cell.shows("STOPPED")
    cell.press(b"c\r")
    cell.becomes("HELD")
    # Let it go: the countdown, and the first reset. A key that meets a change of the state does nothing.
    asked = lambda: "the scene is not confirmed" in cell.desk.output or cell.press(b"\r") or time.sleep(2)  # noqa: E731
    cell.until(asked, "never asked to confirm the scene")
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
    cell.becomes("STOPPED")
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

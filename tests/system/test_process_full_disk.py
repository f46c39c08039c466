"""Full disks and a stuck terminal under a served robot: it moves, holds, goes on, and no record is lost. Need root."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import machines
import pytest
from machines import fill, needs_root
from processes import PATIENCE, Process, actor_totals, learner_totals
from robot_process import WatchedRobot, fake_aloha
from robot_served import HERE
from terminals import OperatedProcess

from serl_chunk.data.formats.hdf5 import read_episode
from serl_chunk.types import Outcome, Source

pytestmark = [pytest.mark.slow, pytest.mark.timeout(6 * PATIENCE), needs_root]
LONG = {"learner__max_steps": 1_000_000, "learner__warmup_episodes": 1_000, "robot__max_episode_steps": 3_000}
FAST = "--config.operator.countdown_s=1"
STILL = 1e-3  # rad


class Cell(WatchedRobot):
    """A robot's server whose log is on a small disk, and a terminal of which nothing may be read for a while.

    `disk` and `box` are of the robot's PC and of the learner.
    """

    disk: Path
    box: Path

    def moves(self, seconds: float) -> None:
        self.becomes("RUN")
        self.until(lambda: self.moved(0.2, "RUN") > STILL, "never moved")
        assert self.moved(seconds, "RUN") > STILL

    def holds(self, seconds: float) -> None:
        time.sleep(1)
        assert self.moved(seconds, "RUN") < STILL

    def quits(self) -> None:
        """End the episode and the session; a key that meets a change between policy and human does nothing."""
        ends = time.monotonic() + 60
        while self.desk.running:
            assert time.monotonic() < ends, self.desk.output[-3000:]
            self.press(b"qqs")
            time.sleep(2)
        assert self.desk.wait() == 0, self.desk.output

    @contextlib.contextmanager
    def full(self, learner: Process) -> Iterator[None]:
        """Fill both disks and the terminal in the block."""
        self.desk.look_away()
        fill(self.box / "filler")
        if "--actor" in self.desk.command:  # whose records are on their way
            learner.says("disk takes no more")
        fill(self.disk / "filler")
        yield
        for disk in (self.disk, self.box):
            (disk / "filler").unlink()
        self.desk.look()


@pytest.fixture
def cell(tmp_path, environment) -> Iterator[Cell]:
    with contextlib.ExitStack() as opened:
        disk, box = (opened.enter_context(machines.small_disk(tmp_path / name, "64m")) for name in ("disk", "box"))
        cell = Cell(tmp_path, fake_aloha(), log=disk / "server.log", environment=environment)
        cell.disk, cell.box = disk, box
        yield opened.enter_context(cell.watched())


def learner_of(processes, cell: Cell) -> Process:
    learner = processes.learner(cell.box / "run", *cell.flags(), **LONG)
    learner.says("listening on")
    return learner


def test_an_actor_and_its_robot_go_on_and_hold(cell, processes):
    learner = learner_of(processes, cell)
    cell.desk = processes.start(
        *processes.flags(**LONG), "--actor", "--spool_path", str(cell.disk / "spool"), *cell.flags(), FAST,
        kind=OperatedProcess,
    )  # fmt: skip
    cell.first_episode()
    cell.moves(0.5)
    with cell.full(learner):
        cell.moves(4)
        cell.press(b" ")
        cell.holds(2)
        cell.press(b"\r")
        cell.moves(1)
        cell.press(b"s")
        cell.becomes("HOLD")
        cell.moved(3, "HOLD")  # no episode begins whose records would have no room
    cell.moves(1)
    cell.quits()
    steps = actor_totals(cell.desk.output)[1]
    learner.until(lambda: not learner.running or "has room again" in learner.output, "no room")
    learner.signal(2)
    assert learner_totals(learner.ends())[1] == steps


def test_a_recording_and_its_robot_go_on_and_hold(cell, processes):
    learner = learner_of(processes, cell)
    cell.desk = processes.start(
        "record", *processes.flags(**LONG), "--policy", "human", "--n_demos", "2", "--out", str(cell.disk / "demos"),
        "--log_file", str(cell.disk / "record.log"), "--spool_path", str(cell.disk / "spool"), "--ip", HERE,
        "--config.actor.intervention=scripted", *cell.flags(), FAST, kind=OperatedProcess,
    )  # fmt: skip
    cell.first_episode()
    cell.moves(0.5)
    with cell.full(learner):
        cell.press(b" ")
        cell.holds(2)
        cell.press(b"\r")
        cell.moves(0.2)
        cell.press(b"s")
        cell.becomes("HOLD")
        cell.moved(3, "HOLD")  # the demonstration has no room
        assert cell.desk.running, cell.desk.output
    cell.shows("demonstration 1 of 2: ")
    cell.moves(0.2)
    cell.press(b"s")
    assert cell.desk.wait() == 0, cell.desk.output
    episodes = [read_episode(file) for file in sorted((cell.disk / "demos").glob("*.hdf5"))]
    assert [e.end.outcome for e in episodes] == [Outcome.SUCCESS] * 2
    assert (episodes[0].steps.source == Source.HOLD).any()
    assert "the learner has all 2" in cell.desk.output

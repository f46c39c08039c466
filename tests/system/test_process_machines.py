"""Machines as they are: another network, full disks, a stuck terminal: no record is lost. Need root; slow."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from counting_robot import LENGTH
from lab import Lab
from processes import PATIENCE, Process, actor_totals, checkpoints, learner_totals
from robot_process import WatchedRobot, fake_aloha
from terminals import OperatedProcess

from serl_chunk.data.formats.hdf5 import read_episode
from serl_chunk.types import Outcome, Source

HERE, THERE = "198.18.77.1", "198.18.77.2"  # of the range that is set aside for tests of networks (RFC 2544)
needs_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(6 * PATIENCE), needs_root]


def command(*words: str) -> None:
    """Run a system command; skips the test with what it says where this machine does not permit it."""
    if shutil.which(words[0]) is None:
        pytest.skip(f"needs the command {words[0]}")
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{' '.join(words)}: {done.stderr.strip()}")


class Cable:
    """What joins a network namespace to this machine, from THERE to HERE."""

    def __init__(self, namespace: str, near: str, far: str) -> None:
        self.prefix = ("ip", "netns", "exec", namespace)  # of a command that runs there
        self._ends = (("ip", "-n", namespace, "link"), far), (("ip", "link"), near)

    def cut(self) -> None:
        """Nothing passes, and neither side is notified."""
        for words, device in self._ends:
            command(*words, "set", device, "down")

    def mend(self) -> None:
        for words, device in self._ends:
            command(*words, "set", device, "up")


@pytest.fixture
def cable() -> Iterator[Cable]:
    """A network namespace whose only way out is a cable."""
    name = f"serl-chunk-{os.getpid()}"
    near, far = f"sc{os.getpid()}a"[:15], f"sc{os.getpid()}b"[:15]
    with contextlib.ExitStack() as stack:
        command("ip", "netns", "add", name)
        stack.callback(subprocess.run, ["ip", "netns", "delete", name], check=True)
        command("ip", "link", "add", near, "type", "veth", "peer", "name", far)
        stack.callback(subprocess.run, ["ip", "link", "delete", near], check=True)
        command("ip", "link", "set", far, "netns", name)
        command("ip", "address", "add", f"{HERE}/30", "dev", near)
        command("ip", "-n", name, "address", "add", f"{THERE}/30", "dev", far)
        made = Cable(name, near, far)
        made.mend()
        yield made


@contextlib.contextmanager
def disk_at(folder: Path, size: str = "24m") -> Iterator[Path]:
    folder.mkdir()
    command("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder))
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(file: Path) -> None:
    with contextlib.suppress(OSError), file.open("wb", buffering=0) as f:
        while f.write(b"\x00" * 4096):
            pass


@pytest.fixture
def small_disk(tmp_path):
    with disk_at(tmp_path / "disk") as folder:
        yield folder


def test_a_cut_cable_loses_and_doubles_nothing(tmp_path, environment, cable):
    """Neither side is notified of the cut: the connections hang, and the robot goes on at its rate."""
    with contextlib.closing(Lab(tmp_path, environment, listen=("--bind", HERE, "--insecure"))) as lab:
        learner, actor = lab.learner(), lab.actor("--ip", HERE, prefix=cable.prefix)
        lab.trains(learner)
        for ticks in (LENGTH // 4, 5 * LENGTH, LENGTH, 10 * LENGTH):  # less than `timeout_s`, and more
            cable.cut()
            lab.goes_on(ticks, actor)
            cable.mend()
            lab.goes_on(3 * LENGTH, actor)
        lab.trains(learner)
        _, said, account = lab.stop(learner, actor)
    assert account.cut == {}
    assert account.died == 0
    assert "connection to the learner at" in said  # it did notice


def test_a_disk_that_stays_full_ends_the_learner_with_its_reasons(processes, small_disk):
    run = small_disk / "run"
    learner = processes.learner(run, learner__max_steps=1_000_000, transport__journal=False)
    actor = processes.actor(learner__max_steps=1_000_000)
    learner.until(lambda: max(checkpoints(run), default=0) >= 20, "no checkpoint of the training appeared")
    fill(small_disk / "filler")
    learner.says("could not be written")
    learner.signal(signal.SIGTERM)
    output = learner.ends(1)
    assert "the report could not be written" in output
    assert "checkpoints could not be written; newest: " in output
    assert actor_totals(actor.ends())[1] == learner_totals(output)[1]


def test_a_full_disk_costs_checkpoints_and_not_the_run(processes, small_disk):
    run = small_disk / "run"
    # Rarely published and few kept: the disk is filled by this test alone.
    settings = {"learner__max_steps": 1_000_000, "learner__keep_checkpoints": 3, "learner__checkpoint_period": 100}
    learner = processes.learner(run, transport__journal=False, **settings)
    actor = processes.actor(**settings)
    learner.until(lambda: max(checkpoints(run), default=0) >= 100, "no checkpoint of the training appeared")
    fill(small_disk / "filler")
    learner.says("Training goes on, and the next checkpoint_period tries again. If the disk is full, free some space.")
    assert f"could not be written to {run / 'checkpoints'}" in learner.output
    full = max(checkpoints(run))
    (small_disk / "filler").unlink()
    learner.until(lambda: max(checkpoints(run)) > full, "no checkpoint after the disk had room again")
    learner.signal(signal.SIGTERM)
    output = learner.ends(1)  # the run is whole, but the status alone is to show it
    assert "checkpoints could not be written; newest: " in output
    updates, steps = learner_totals(output)
    assert checkpoints(run)[-1] == updates
    assert actor_totals(actor.ends())[1] == steps


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
        ends = time.monotonic() + 60
        while self.desk.running:
            assert time.monotonic() < ends, self.desk.output[-3000:]
            self.press(b"qqs")
            time.sleep(2)
        assert self.desk.wait() == 0, self.desk.output

    @contextlib.contextmanager
    def full(self, learner: Process) -> Iterator[None]:
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
        disk, box = (opened.enter_context(disk_at(tmp_path / name, "64m")) for name in ("disk", "box"))
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
        "--log_file", str(cell.disk / "record.log"), "--spool_path", str(cell.disk / "spool"), "--ip", "127.0.0.1",
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

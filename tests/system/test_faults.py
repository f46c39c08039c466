"""Kills, moves and clocks that jump: every step is in the store exactly once, in order. And a storm of kills.

In a storm `kills.txt` has a line for each kill; a run whose folder KILL_STORM_FOLDER names goes on after the last one.
"""

from __future__ import annotations

import collections
import contextlib
import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from counting_robot import LENGTH, LOG, PAUSE
from lab import TAIL, Lab
from processes import PATIENCE, Process, actor_totals, learner_totals
from system_accounts import Account, journal_rows

from serl_chunk.types import StepBlock

DAY = 86_400.0


def test_nothing_is_lost_or_doubled_when_each_side_is_killed(lab):
    learner, actor = lab.learner(), lab.actor()
    lab.trains(learner)
    actor.until(lambda: LENGTH // 4 < lab.executed() % LENGTH < LENGTH // 2, "no episode is under way")
    actor.kill()  # between two episodes there would be nothing to end
    actor = lab.actor()
    actor.says("of a previous actor are sent")
    assert "another live session" not in actor.output  # it is let in at once
    lab.goes_on(LENGTH, actor)
    learner.kill()
    lab.goes_on(2 * LENGTH, actor)  # the robot is not held up
    learner = lab.learner()
    learner.says("online steps put back")
    lab.trains(learner)
    lab.goes_on(LENGTH, actor)
    output, said, account = lab.stop(learner, actor)
    assert "online replay is empty" not in output
    assert account.died == 1
    assert sum(account.cut.values()) <= TAIL
    assert len(account.cut) <= 1
    assert actor_totals(said)[1] > 3 * LENGTH


@pytest.mark.slow
def test_nothing_is_lost_or_doubled_when_clocks_jump(tmp_path, environment):
    """By days, on both sides; nothing that counts depends on them."""
    path = os.pathsep.join([str(Path(__file__).with_name("wrong_clock")), environment.get("PYTHONPATH", "")])
    clock, days = tmp_path / "clock", "--config.transport.journal_days=0.5"
    jumping = {**environment, "PYTHONPATH": path.rstrip(os.pathsep), "WRONG_CLOCK": str(clock)}
    with contextlib.closing(Lab(tmp_path, jumping)) as lab:
        learner, actor = lab.learner(days), lab.actor()
        lab.trains(learner)
        for offset in (3 * DAY, -30 * DAY, 0.0):  # a learner sees its journal age at once, then come from the future
            clock.write_text(str(offset))
            lab.goes_on(LENGTH, actor)
            lab.trains(learner)
            actor.kill()
            actor = lab.actor()
            lab.goes_on(LENGTH, actor)
            learner.kill()
            lab.goes_on(LENGTH, actor)
            learner = lab.learner(days)
            learner.says("online steps put back")
            lab.trains(learner)
        _, said, account = lab.stop(learner, actor)
    assert account.died <= 3
    assert max(account.cut.values(), default=0) <= TAIL
    assert "late" in said


ACTORS = ("left", "middle", "right")
LEARNER = "learner"
FOLDER = "KILL_STORM_FOLDER"
# Ticks between a robot and its spool when the actor is killed: the five of a decision wait for each other, and as many
# may follow while the thread that spools them waits for a core.
UNDER_WAY = 10
SETTINGS = (
    "--config.actor.clock=lockstep",
    "--config.learner.checkpoint_period=200",
    "--config.learner.log_period=100",
    "--config.learner.keep_checkpoints=3",
    "--config.replay.capacity=500000",  # the journal keeps every step of the run
)


class Storm:
    """One run of a learner and its actors; any of them is killed, or stands still, and is started again."""

    def __init__(self, folder: Path, environment: dict[str, str], actors: Sequence[str], seed: int) -> None:
        self._lab = Lab(folder, {**environment, PAUSE: "0.01"})
        self._logs = {name: folder / f"executed_{name}.txt" for name in actors}
        self._actors, self._kills, self._seed = tuple(actors), folder / "kills.txt", seed
        self._processes: dict[str, Process] = {}
        self._before: dict[str, int] = {}  # progress when the process was started

    @property
    def killed(self) -> list[str]:
        return self._kills.read_text().split() if self._kills.exists() else []

    def run(self, kills: int) -> None:
        for name in (LEARNER, *self._actors):
            self._start(name)
        begin = time.monotonic()
        for i in range(len(self.killed), kills):
            rng = random.Random(f"{self._seed}/{i}")
            name = rng.choice((LEARNER, *self._actors))
            at_once, frozen = rng.random() < 0.1, random.Random(f"frozen {self._seed}/{i}")
            if frozen.random() < 0.1:
                self._freeze(self._processes[frozen.choice((LEARNER, *self._actors))])
            if at_once:
                time.sleep(rng.uniform(0.0, 2.0))
                how = "at once"
            else:
                goal = self._before[name] + rng.randint(1, 2000 if name == LEARNER else LENGTH)
                self._await(name, goal)
                how = "after progress"
            self._processes[name].kill()
            with self._kills.open("a") as file:
                file.write(f"{name}\n")
            print(f"kill {i + 1} of {kills}: {name}, {how}, {time.monotonic() - begin:.0f} s", flush=True)
            self._start(name)

    def settle(self) -> Account:
        for name in self._processes:
            self._await(name, self._before[name] + 1)
        for name in self._actors:
            self._processes[name].signal(signal.SIGTERM)
        for name in self._actors:
            self._processes[name].ends()
        self._processes[LEARNER].signal(signal.SIGTERM)
        output = self._processes[LEARNER].ends()
        self._lab.log.write_text("".join(log.read_text() for log in self._logs.values()))
        account = self._lab.settled()
        assert learner_totals(output)[1] == account.steps
        return account

    def check_order(self) -> None:
        stored = {name: [] for name in self._actors}
        for row in journal_rows(self._lab.run):
            if isinstance(row.record, StepBlock):
                states = row.record.observation["state"]
                stored[row.actor_id] += [(int(life), int(episode), int(tick)) for life, episode, tick, _ in states]
        assert all(stored.values())
        for name, log in self._logs.items():
            rows = [line.split() for line in log.read_text().splitlines()]
            executed = [tuple(int(float.fromhex(x)) for x in row[:3]) for row in rows]
            place = {key: i for i, key in enumerate(executed)}
            places = [place[key] for key in stored[name]]
            assert places == sorted(places), f"{name}'s ticks are out of order"

    def close(self) -> None:
        self._lab.close()

    def _freeze(self, process: Process) -> None:
        process.signal(signal.SIGSTOP)
        time.sleep(10.0)
        process.signal(signal.SIGCONT)

    def _start(self, name: str) -> None:
        self._before[name] = self._progress(name)
        if name == LEARNER:
            self._processes[name] = self._lab.learner(*SETTINGS)
        else:
            prefix = ("env", f"{LOG}={self._logs[name]}")
            self._processes[name] = self._lab.actor(*SETTINGS, "--actor_id", name, prefix=prefix)

    def _await(self, name: str, goal: int) -> None:
        """Wait until `_progress` has come to `goal`; a long journal takes minutes to read, and actors wait."""
        there = lambda: self._progress(name) >= goal  # noqa: E731
        self._processes[name].until(there, f"{name} stands", at_work=" reading ")

    def _progress(self, name: str) -> int:
        if name == LEARNER:
            return sum(file.stat().st_size for file in (self._lab.run / "journal" / "online").glob("*.journal"))
        return self._logs[name].read_bytes().count(b"\n") if self._logs[name].exists() else 0


@pytest.mark.slow  # tests/system/test_faults.py kills each side once
@pytest.mark.parametrize(
    ("actors", "kills", "seed"),
    [
        (2, 3, 26),  # the learner, the learner as it starts, an actor
        pytest.param(3, 200, 0, marks=pytest.mark.timeout(20 * PATIENCE)),
    ],
)
def test_nothing_is_lost_but_ticks_under_way_whoever_is_killed(tmp_path, environment, actors, kills, seed):
    folder = Path(os.environ.get(FOLDER, tmp_path)) / f"{kills}_kills"
    folder.mkdir(parents=True, exist_ok=True)
    storm = Storm(folder, environment, ACTORS[:actors], seed)
    try:
        storm.run(kills)
        account = storm.settle()
        killed = collections.Counter(storm.killed)
    finally:
        storm.close()
    print(account._replace(cut=sorted(account.cut.values())), f"after {dict(killed)}")
    storm.check_order()
    assert killed.total() == kills
    assert account.steps + sum(account.cut.values()) == account.executed
    assert len(account.cut) <= kills - killed[LEARNER]
    assert max(account.cut.values(), default=0) <= UNDER_WAY

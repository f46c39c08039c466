"""Several actors and their learner are killed again and again at random; the journal holds what each robot did.

`kill -9` strikes one of them, chosen by a seeded generator, once it has made progress since its last start; a tenth
of the kills strike while it starts, wherever it is then. A robot writes every tick to a file of its own before the tick
is handed over. At the end the journal has all of them once and in order, but those that were under way when an actor
was killed. `kills.txt` in the folder has a line for each kill; a run whose folder `KILL_STORM_FOLDER` names goes on
after the last of them.
"""

from __future__ import annotations

import collections
import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from counting_robot import LENGTH, LOG, PAUSE
from lab import Lab
from processes import PATIENCE, Process, learner_totals
from system_accounts import Account, journal_order

ACTORS = ("left", "middle", "right")
LEARNER = "learner"
FOLDER = "KILL_STORM_FOLDER"
# Ticks between a robot and its spool when the actor is killed: lockstep sets no pace but the robot's own 10 ms.
UNDER_WAY = 5
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
        """Start all of them and kill until there were so many; print a line for each."""
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
        """End all of them in order; returns the account of everything that any of them ever did."""
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
        """Assert that the journal has every actor's ticks in the order in which its robot made them."""
        stored = journal_order(self._lab.run)
        assert stored.keys() == set(self._actors)
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

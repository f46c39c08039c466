"""Processes are killed, frozen and cut off; every step that was recorded is in the store exactly once, in order."""

from __future__ import annotations

import random
import re
import signal
import time
from pathlib import Path

import pytest
from accounts import settle
from counting_robot import LENGTH, LOG
from processes import Cluster, actor_totals, learner_totals

from serl_chunk.learner.run_metrics import read_metrics
from serl_chunk.transport.sockets import free_port

ROBOT = str(Path(__file__).with_name("counting_robot.py"))
TAIL = 5  # steps a killed actor may have handed over and not recorded; two ticks are promised where the machine is idle


class Lab:
    """A learner and an actor of the counting robot, and what the robot says it did."""

    def __init__(self, folder: Path, environment) -> None:
        self.log, self.run, self.folder = folder / "executed.txt", folder / "run", folder
        self._cluster = Cluster(folder, folder / "none", environment | {LOG: str(self.log)})
        self.flags = ["--exp_name", ROBOT, "--port", str(self._cluster.port)]
        self.close = self._cluster.close

    def learner(self, *more: str):
        return self._cluster.start(*self.flags, "--learner", "--debug", "--checkpoint_path", str(self.run), *more)

    def actor(self, *more: str):
        spool = str(self.folder / "spool")
        return self._cluster.start(*self.flags, "--actor", "--spool_path", spool, *more)

    def move(self) -> None:
        """What is started from now on uses other ports."""
        self.flags[-1] = str(free_port())

    def executed(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0

    def goes_on(self, steps: int, *processes) -> None:
        """Wait until the robot has made that many more steps while these processes run."""
        goal = self.executed() + steps
        processes[0].until(lambda: self.executed() >= goal, "the robot stands still")

    def updates(self) -> int:
        rows = read_metrics(self.run)["train"] if (self.run / "metrics.jsonl").exists() else []
        return max((row["step"] for row in rows), default=0)

    def stop(self, learner, actor):
        """End both in order; returns (learner's output, actor's output, account)."""
        actor.signal(signal.SIGTERM)
        said = actor.ends()
        learner.signal(signal.SIGTERM)
        return learner.ends(), said, settle(self.run, self.log)


@pytest.fixture
def lab(tmp_path, environment):
    lab = Lab(tmp_path, environment)
    yield lab
    lab.close()


def test_nothing_is_lost_or_doubled_when_each_side_is_killed(lab):
    learner, actor = lab.learner(), lab.actor()
    learner.until(lambda: lab.updates() >= 20, "no training")
    actor.kill()
    actor = lab.actor()
    actor.says("records of an actor before this one are sent")
    assert "another live session" not in actor.output  # it is let in at once
    lab.goes_on(LENGTH, actor)
    learner.kill()
    lab.goes_on(2 * LENGTH, actor)  # the robot is not held up
    learner = lab.learner()
    learner.says("online steps put back")
    before = lab.updates()
    learner.until(lambda: lab.updates() >= before + 20, "training does not go on")
    lab.goes_on(LENGTH, actor)
    output, said, account = lab.stop(learner, actor)
    assert "online replay is empty" not in output
    assert learner_totals(output)[1] == account.steps
    assert account.died == 1
    assert sum(account.cut.values()) <= TAIL
    assert len(account.cut) <= 1
    assert account.steps + sum(account.cut.values()) == account.executed
    assert actor_totals(said)[1] > 3 * LENGTH


@pytest.mark.slow
def test_twenty_faults_in_one_run(lab):
    """Kills of the learner, the actor and both, and freezes of ten seconds, at random moments of one training run."""
    rng = random.Random(0)
    learner, actor = lab.learner(), lab.actor()
    learner.until(lambda: lab.updates() >= 20, "no training")
    killed = 0
    for i in range(20):
        time.sleep(rng.uniform(0.2, 3.0))
        fault = ("actor", "learner", "both", "actor", "freeze actor", "learner", "both", "freeze learner")[i % 8]
        if fault.startswith("freeze"):
            frozen = actor if fault.endswith("actor") else learner
            frozen.signal(signal.SIGSTOP)
            time.sleep(10.0)
            frozen.signal(signal.SIGCONT)
        if fault in ("actor", "both"):
            actor.kill()
            killed += 1
        if fault in ("learner", "both"):
            learner.kill()
            learner = lab.learner()
        if fault in ("actor", "both"):
            actor = lab.actor()
        lab.goes_on(LENGTH, actor)
    before = lab.updates()
    learner.until(lambda: lab.updates() >= before + 20, "training does not go on")
    output, _, account = lab.stop(learner, actor)
    print(account._replace(cut=sorted(account.cut.values())), f"after {killed} killed actors")
    assert learner_totals(output)[1] == account.steps
    assert len(account.cut) <= killed
    assert max(account.cut.values(), default=0) <= TAIL
    assert account.steps + sum(account.cut.values()) == account.executed


@pytest.mark.slow
def test_a_learner_on_another_port_is_found_by_a_restarted_actor(lab):
    """What an actor had kept for a learner reaches it wherever it is started again."""
    learner, actor = lab.learner(), lab.actor()
    learner.until(lambda: lab.updates() >= 20, "no training")
    learner.kill()
    lab.goes_on(2 * LENGTH, actor)
    actor.kill()
    lab.move()
    learner, actor = lab.learner(), lab.actor()
    lab.goes_on(LENGTH, actor)
    output, _, account = lab.stop(learner, actor)
    assert learner_totals(output)[1] == account.steps
    assert account.steps + sum(account.cut.values()) == account.executed
    assert sum(account.cut.values()) <= TAIL


@pytest.mark.slow
def test_what_the_control_loop_feels_of_a_dying_learner(lab):
    """Prints the lateness of a run without faults and of one with; both count every step."""
    rows = []
    learner = lab.learner()
    for faults in (False, True):
        actor = lab.actor()
        lab.goes_on(LENGTH, actor)
        if faults:
            learner.kill()
            lab.goes_on(5 * LENGTH, actor)
            learner = lab.learner()
            learner.says("online steps put back")
            lab.goes_on(5 * LENGTH, actor)
            learner.signal(signal.SIGSTOP)
            lab.goes_on(5 * LENGTH, actor)
            learner.signal(signal.SIGCONT)
            lab.goes_on(5 * LENGTH, actor)
        else:
            lab.goes_on(20 * LENGTH, actor)
        actor.signal(signal.SIGTERM)
        said = actor.ends()
        rows.append(re.findall(r"lateness p50 .*", said)[-1])
    learner.signal(signal.SIGTERM)
    output, account = learner.ends(), settle(lab.run, lab.log)
    print(f"without faults: {rows[0]}\nwith faults:    {rows[1]}")
    assert learner_totals(output)[1] == account.steps == account.executed

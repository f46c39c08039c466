"""Processes are killed, frozen and cut off; every step that was recorded is in the store exactly once, in order."""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time

import pytest
from flaky_proxy import flaky
from lab import LENGTH, TAIL, Lab
from ports import free_port
from processes import actor_totals, learner_totals


def cores() -> list[int]:
    """Which this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def on(some: list[int]) -> list[str]:
    """A command before another one: it runs on these cores only."""
    code = f"import os, sys; os.sched_setaffinity(0, {some}); os.execv(sys.argv[1], sys.argv[1:])"
    return [sys.executable, "-c", code]


@pytest.fixture
def lab(tmp_path, environment):
    lab = Lab(tmp_path, environment)
    yield lab
    lab.close()


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
def test_twenty_faults_in_one_run(lab):
    """Kills of the learner, the actor and both, and freezes of ten seconds, at random moments of one training run."""
    rng = random.Random(0)
    learner, actor = lab.learner(), lab.actor()
    lab.trains(learner)
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
    lab.trains(learner)
    _, _, account = lab.stop(learner, actor)
    print(account._replace(cut=sorted(account.cut.values())), f"after {killed} killed actors")
    assert len(account.cut) <= killed
    assert max(account.cut.values(), default=0) <= TAIL


@pytest.mark.slow
def test_a_learner_on_another_port_is_found_by_a_restarted_actor(lab):
    """What an actor had kept for a learner reaches it wherever it is started again."""
    learner, actor = lab.learner(), lab.actor()
    lab.trains(learner)
    learner.kill()
    lab.goes_on(2 * LENGTH, actor)
    actor.kill()
    lab.move()
    learner, actor = lab.learner(), lab.actor()
    lab.goes_on(LENGTH, actor)
    _, _, account = lab.stop(learner, actor)
    assert sum(account.cut.values()) <= TAIL


@pytest.mark.slow
def test_a_thin_line_for_everything_carries_policies_and_records(lab):
    """Both take several time-outs: 60 kB of policy and a backlog of steps at 10 kB/s, heartbeats on the same line."""
    port = free_port()
    thin = ("--config.transport.timeout_s=0.8", "--config.transport.heartbeat=0.2", "--config.agent.flow.hidden=96,96")
    with flaky(port, lab.port, shared=True, buffer=8192) as line:
        line.rate = 1e4
        learner, actor = lab.learner(*thin), lab.actor(*thin, "--port", str(port))
        lab.goes_on(6 * LENGTH, actor)  # which begins with the first policy
        _, said, account = lab.stop(learner, actor)
    assert actor_totals(said)[1] == account.steps == account.executed


@pytest.mark.slow
def test_a_bad_link_loses_and_doubles_nothing(lab):
    """Slow, halved and halved again, broken again and again, and away, in turn, while the robot goes on at its rate."""
    port = free_port()
    with flaky(port, lab.port) as link:
        learner, actor = lab.learner(), lab.actor("--port", str(port))
        lab.trains(learner)
        for delay, rate in ((0.0, 0.0), (0.1, 0.0), (0.0, 40e3), (0.0, 20e3), (0.0, 0.0)):
            link.delay, link.rate = delay, rate
            lab.goes_on(2 * LENGTH, actor)
            for _ in range(5):
                link.break_connections()
                lab.goes_on(LENGTH // 4, actor)
            link.cut = True
            link.break_connections()
            lab.goes_on(4 * LENGTH, actor)
            link.cut = False
        lab.trains(learner)
        _, said, account = lab.stop(learner, actor)
    assert link.broken > 20
    assert account.cut == {}
    assert account.died == 0
    assert "connection to the learner at" in said


@pytest.mark.slow
@pytest.mark.skipif(len(cores()) < 2, reason="needs a core for each side")
def test_what_the_control_loop_feels_of_a_dying_learner(lab):
    """Prints the lateness of a run without faults and of one with; both count every step.

    Each side has cores of its own, as on two machines: a learner that starts compiles on all it has.
    """
    ours, theirs = cores()[:1], cores()[1:]
    rows = []
    learner = lab.learner(prefix=on(theirs))
    for faults in (False, True):
        actor = lab.actor(prefix=on(ours))
        lab.goes_on(LENGTH, actor)
        if faults:
            learner.kill()
            lab.goes_on(5 * LENGTH, actor)
            learner = lab.learner(prefix=on(theirs))
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
    output, account = learner.ends(), lab.settled()
    print(f"without faults: {rows[0]}\nwith faults:    {rows[1]}")
    assert learner_totals(output)[1] == account.steps == account.executed

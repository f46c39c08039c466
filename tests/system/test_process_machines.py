"""Machines as they are: an actor on another network, a disk that is full. Need root; slow."""

import contextlib
import signal

import machines
import pytest
from lab import LENGTH, Lab
from machines import HERE, fill, needs_root
from processes import PATIENCE, actor_totals, checkpoints, learner_totals

pytestmark = [pytest.mark.slow, pytest.mark.timeout(4 * PATIENCE), needs_root]


@pytest.fixture
def cable():
    with machines.cable() as made:
        yield made


@pytest.fixture
def small_disk(tmp_path):
    with machines.small_disk(tmp_path / "disk") as folder:
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


def test_records_wait_at_the_robot_while_the_learners_disk_is_full(tmp_path, environment, small_disk):
    with contextlib.closing(Lab(tmp_path, environment, run=small_disk / "run")) as lab:
        learner, actor = lab.learner(), lab.actor()
        lab.trains(learner)
        fill(small_disk / "filler")
        learner.says("disk takes no more")
        lab.goes_on(2 * LENGTH, actor)
        (small_disk / "filler").unlink()
        learner.says("has room again")
        lab.trains(learner)
        actor.signal(signal.SIGTERM)
        actor.ends()
        learner.signal(signal.SIGTERM)
        learner.until(lambda: not learner.running, "it goes on")
        account = lab.settled()
    assert account.steps == account.executed


def test_records_wait_in_memory_while_the_robots_disk_is_full(tmp_path, environment, small_disk):
    with contextlib.closing(Lab(tmp_path, environment, spool=small_disk / "spool")) as lab:
        learner, actor = lab.learner(), lab.actor()
        lab.trains(learner)
        learner.signal(signal.SIGSTOP)  # what is recorded now stays in the spool
        lab.goes_on(LENGTH // 2, actor)
        fill(small_disk / "filler")
        actor.says("records are kept in memory until it can be written again")
        (small_disk / "filler").unlink()
        learner.signal(signal.SIGCONT)
        lab.goes_on(4 * LENGTH, actor)
        _, _, account = lab.stop(learner, actor)
    assert account.cut == {}


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

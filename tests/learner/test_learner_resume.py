"""A stop or a kill in phases that count no steps: a resume goes on within them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from learner_tools import assert_same_state, feed, journal_of, learner_of, let_go, until
from point_robot import experiment

from serl_chunk.actor.policy import ChunkPolicy, Request
from serl_chunk.learner.learner import Learner
from serl_chunk.learner.schedule import Phase
from serl_chunk.robots.registry import robot_spec
from serl_chunk.runs.checkpoints import TimedCheckpoints
from serl_chunk.types import STATE, Snapshot

pytestmark = [pytest.mark.compiles, pytest.mark.usefixtures("quick")]


def timed(run: Path) -> list[str]:
    folder = run / "checkpoints_timed"
    return sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []


def test_pretraining_that_was_stopped_goes_on_as_if_it_had_not_been(demos, tmp_path, caplog):
    config = experiment(pretrain_steps=60, critic_pretrain_steps=40)
    whole = learner_of(config, demos, tmp_path / "whole")
    until(whole, Phase.WARMUP)
    run = tmp_path / "run"
    for phase, updates in ((Phase.PRETRAIN, 40), (Phase.CRITIC_PRETRAIN, 20)):
        learner = learner_of(config, demos, run)
        assert not learner.writes_checkpoint
        until(learner, phase, updates)
        assert learner.writes_checkpoint
        let_go(learner)
        assert len(timed(run)) == 1
        assert not (run / "checkpoints").exists()
    caplog.clear()
    rest = learner_of(config, demos, run)
    assert "demonstrations, in phase 2/4 critic pretrain after update 20" in caplog.text
    # No actor begins yet.
    assert (rest.trainer.phase, rest.trainer.phase_updates, rest.version) == (Phase.CRITIC_PRETRAIN, 20, 0)
    until(rest, Phase.WARMUP)
    assert_same_state(whole, rest)
    let_go(rest)
    let_go(whole)
    again = learner_of(config, demos, run)  # from the checkpoint after pretraining: it is the newer one
    assert again.trainer.phase is Phase.WARMUP
    let_go(again)


def test_without_a_ratio_a_learner_trains_on_as_fast_as_it_can_and_resumes_with_one(demos, tmp_path):
    plain = {"pretrain_steps": 20, "max_steps": 40}
    config = experiment(**plain, utd_ratio=None)
    first = learner_of(config, demos, tmp_path)
    until(first, Phase.WARMUP)
    assert not first.work()  # training starts with steps
    feed(first, journal_of(config, demos, 40))
    until(first, Phase.TRAIN)
    for _ in range(30):
        assert first.work()
    status = first.status()
    assert (status["done"], status["total"]) == (30, 40)
    assert (status["steps_missing"], status["updates_due"], status["may_record"]) == (0, 0, None)
    assert first.trainer.progress(first.router.env_steps)["updates_owed"] == 0.0
    first.checkpoint()
    let_go(first)
    second = learner_of(experiment(**plain, utd_ratio=1.0, max_lag_steps=20), demos, tmp_path)
    assert (second.updates, second.trainer.schedule.updates_due) == (30, 0)
    let_go(second)
    third = learner_of(config, demos, tmp_path)
    feed(third, journal_of(config, demos, 40, "y"))
    until(third, Phase.DONE, busy=True)
    assert third.updates == 40
    let_go(third)


def test_without_a_ratio_training_ends_with_the_last_online_step(demos, tmp_path, caplog):
    plain = {"pretrain_steps": 20, "training_starts": 1}
    config = experiment(**plain, utd_ratio=None, online_steps=60)
    journal = journal_of(config, demos, 60)
    learner = learner_of(config, demos, tmp_path / "run")
    until(learner, Phase.WARMUP)
    feed(learner, journal[:6])  # the warm-up's two episodes
    assert learner.router.env_steps < 60
    until(learner, Phase.TRAIN)
    for _ in range(7):
        learner.work()
    assert (learner.status()["done"], learner.status()["total"]) == (learner.router.env_steps, 60)
    feed(learner, journal[6:])
    until(learner, Phase.DONE)
    assert learner.updates == 7
    let_go(learner)
    late = learner_of(config, demos, tmp_path / "late")
    until(late, Phase.WARMUP)
    feed(late, journal)
    until(late, Phase.DONE)
    assert "came before the first one. Raise learner.online_steps" in caplog.text
    let_go(late)


def test_a_killed_learner_loses_what_came_after_the_last_timed_checkpoint(demos, tmp_path):
    """Between two checkpoints of the period, of which there are none here."""
    config = experiment(offline_steps=200, online_steps=0, checkpoint_period=0, pretrain_steps=0)
    seconds = [0.0]
    killed = learner_of(config, demos, tmp_path)
    killed.checkpoints.timed = TimedCheckpoints(tmp_path, period=60.0, now=lambda: seconds[0])
    until(killed, Phase.OFFLINE)
    while killed.updates < 31:
        if killed.updates in (10, 20):
            seconds[0] += 60.0
        killed.work()
        killed.checkpoints.timed.wait()
    assert killed.checkpoints.steps() == [0]
    assert timed(tmp_path) == ["2"]
    killed.checkpoint = lambda **_: True  # a killed process writes nothing more
    let_go(killed)
    rest = learner_of(config, demos, tmp_path)
    assert (rest.trainer.phase, rest.updates) == (Phase.OFFLINE, 20)
    let_go(rest)


def first_chunks(learner: Learner, snapshot: Snapshot) -> list[np.ndarray]:
    """Chunks of an actor's first decision and its second, in robot units, for fixed observations and a fixed key."""
    policy = ChunkPolicy(learner.agent, learner.preprocess, robot_spec(learner.config.robot), seed=11)
    policy.swap(snapshot)
    return [
        policy.decide(Request({STATE: np.array(state, np.float32)}, tick=0, epoch=0, explore=True)).actions
        for state in ([0.5, -0.25], [-0.6, 0.1])
    ]


@pytest.mark.parametrize(("phase", "updates"), [(Phase.WARMUP, 0), (Phase.TRAIN, 0), (Phase.TRAIN, 30)])
def test_a_resumed_run_acts_with_the_policy_it_had(demos, tmp_path, phase, updates):
    """Bit for bit: parameters, normaliser, and whether the critic chooses."""
    config = experiment(pretrain_steps=20, critic_pretrain_steps=20)
    snapshots: list[Snapshot] = []
    publish = lambda snapshot, info: snapshots.append(snapshot)  # noqa: E731
    first = learner_of(config, demos, tmp_path, publish)
    until(first, Phase.WARMUP)
    if phase is not Phase.WARMUP:
        feed(first, journal_of(config, demos, 40))
        until(first, phase)
        feed(first, journal_of(config, demos, 40, "y"))
    while phase is Phase.TRAIN and first.updates < updates:
        assert first.work()
    first.publish()
    let_go(first)
    last = snapshots[-1]
    second = learner_of(config, demos, tmp_path, publish)
    resumed = snapshots[-1]
    assert resumed.version > last.version
    assert resumed.origin.normaliser == last.origin.normaliser
    np.testing.assert_array_equal(first_chunks(first, last), first_chunks(second, resumed))
    let_go(second)

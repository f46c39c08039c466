"""The training loop in one process: order, counters, reproducibility, resume, and a policy that learns."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import numpy as np
import pytest
from errors import naming
from learner_tools import agent_of, assert_same_state, by_kind, feed, journal_of, learner_of, let_go, phases, until
from point_robot import experiment, record_demos

from serl_chunk.actor.policy import LocalPolicy, Request
from serl_chunk.agents.spec import agent_spec
from serl_chunk.cli.local import train_local
from serl_chunk.data.preprocess import Preprocess
from serl_chunk.evaluation.rollouts import evaluate
from serl_chunk.learner.building import RunOptions
from serl_chunk.learner.learner import Learner
from serl_chunk.learner.schedule import Phase
from serl_chunk.replay.replay import Ready, Replay
from serl_chunk.robots.registry import make_env, robot_spec
from serl_chunk.runs.checkpoints import CheckpointStore, TimedCheckpoints, kept_versions, roll_back
from serl_chunk.types import STATE, ConfigError, Snapshot

pytestmark = [pytest.mark.compiles, pytest.mark.usefixtures("quick")]


def test_phases_and_counters(finished):
    run, first, summary, published = finished
    # Of the offline phase there are no steps.
    assert phases(run) == [p for p in Phase if p not in (Phase.PRETRAIN, Phase.OFFLINE, Phase.COLLECT)]
    assert first.trainer.phase is Phase.DONE
    assert first.updates == 60 == int(first.state.critic_updates) - 20  # pretrained
    # the limiter: one update per step since the warm-up, and no more steps ahead than permitted
    assert 60 <= first.env_steps <= 60 + 20 + 20 + 2 * 10
    assert (summary.reason, summary.steps) == ("training is complete", first.env_steps)
    assert first.checkpoints.steps() == [0, 40, 60]
    assert [p.version for p in published] == list(range(1, 2 + 60 // 20))  # after pretraining, every 20 updates
    assert [p.step for p in published[:3]] == [0, 20, 40]
    # Imitation, until the critic saw failures.
    assert [p.chooses for p in published] == [False, *[True] * (len(published) - 1)]
    assert {"train", "episode", "event"} <= by_kind(run).keys()


def test_a_resumed_run_goes_on(demos, finished, published, caplog):
    run, before, _, begun = finished
    longer = experiment(critic_pretrain_steps=20, max_steps=100)
    after, summary = train_local(longer, RunOptions([demos], str(run)))
    assert "learner.max_steps: 60 -> 100" in caplog.text
    assert f"resumed at step 60, {before.env_steps} online steps, 12 demonstrations" in caplog.text
    assert (after.trainer.phase, after.updates) == (Phase.DONE, 100)
    assert after.env_steps == before.env_steps + summary.steps
    assert after.episodes == before.episodes + summary.episodes
    assert int(after.state.critic_updates) == int(before.state.critic_updates) + 40
    assert int(after.state.policy_updates) > int(before.state.policy_updates)
    # The store was empty; the steps that fill it again entitle to updates as all others do.
    assert 40 - 20 <= summary.steps <= 40 + 20 + 2
    versions = [p.version for p in [*begun, *published]]
    assert versions == sorted(set(versions))
    assert {p.chooses for p in published} == {True}
    steps = [r["step"] for r in by_kind(run)["train"]]
    assert steps == sorted(steps)
    of_episodes = [r["phase"] for r in by_kind(run)["episode"]]
    assert of_episodes == sorted(of_episodes, reverse=True)  # the warm-up comes first, and once: not after the resume
    assert set(of_episodes) == {"warmup", "train"}
    assert after.checkpoints.steps() == [0, 40, 60, 80, 100]

    caplog.clear()
    done, summary = train_local(longer, RunOptions([demos], str(run)))
    assert "resumed at step 100: training is complete" in caplog.text
    assert (done.updates, summary.steps) == (100, 0)
    assert done.checkpoints.steps() == [0, 40, 60, 80, 100]


def test_training_waits_where_everything_was_discarded(demos, tmp_path, monkeypatch, caplog):
    learner = learner_of(experiment(), demos, tmp_path / "run")
    learner.trainer.schedule.limiter.start(0)
    learner.router.env_steps, learner.trainer.phase = 100, Phase.TRAIN
    caplog.clear()
    monkeypatch.setattr(Replay, "ready", property(lambda self: Ready(100, 0, 0, 0)))
    assert learner.work()
    assert learner.trainer.phase is Phase.WARMUP
    assert caplog.messages[0].startswith("the replay has no window left to train on")
    assert not learner.work()
    let_go(learner)


def test_pretraining_without_demonstrations_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(ConfigError, match=naming("demo_path", "learner.pretrain_steps", 0)):
        train_local(experiment(), RunOptions([], str(tmp_path / "run")))
    config = experiment(pretrain_steps=0, max_steps=20)
    assert train_local(config, RunOptions([], str(tmp_path / "other")))[0].updates == 20


def test_changed_data_do_not_shift_a_resumed_networks_inputs_and_another_transform_is_refused(
    demos, finished, tmp_path, caplog
):
    run, config = finished.run, finished.learner.config
    kept = (run / "config.json").read_text()
    changed = dataclasses.replace(config, normaliser=dataclasses.replace(config.normaliser, actions="absolute_demo"))
    named = "normaliser.actions", "absolute_demo", "absolute_range", "checkpoint_path"
    with pytest.raises(ConfigError, match=naming(*named)):
        train_local(changed, RunOptions([demos], str(run)))
    assert (run / "config.json").read_text() == kept
    caplog.clear()
    more = record_demos(tmp_path / "more", 3)
    after, _ = train_local(experiment(critic_pretrain_steps=20, max_steps=80), RunOptions([more], str(run)))
    said = "the demonstrations or normaliser settings changed since the checkpoint: its normaliser is kept"
    assert said in caplog.text
    assert after.preprocess.digest() == finished.learner.preprocess.digest()


def test_a_phase_trains_on_nothing_drawn_before_it_and_a_lost_last_snapshot_is_logged(demos, tmp_path, caplog):
    def broken(snapshot, info):
        raise OSError("the socket is gone")

    def drawing():
        return any(thread.name.startswith("batches") for thread in threading.enumerate())

    learner, seen = learner_of(experiment(), demos, tmp_path / "run", broken, threaded=True), False
    while learner.trainer.phase is not Phase.WARMUP:
        learner.work()
        seen |= drawing()
    assert (seen, drawing()) == (True, False)
    let_go(learner)
    assert "the newest snapshot did not reach the actors (OSError: the socket is gone)" in caplog.messages


def success_rate(config, run, step: int) -> float:
    """Of one checkpoint's mean policy on 50 held-out starts."""
    checkpoint = CheckpointStore(run).restore_policy(step)
    spec = robot_spec(config.robot)
    preprocess = Preprocess.restored(config, spec, checkpoint.meta, checkpoint.normaliser)
    policy = LocalPolicy(agent_of(config.agent, agent_spec(config, spec)), preprocess, spec)
    policy.swap(Snapshot(checkpoint.step, checkpoint.params))
    return evaluate(make_env(config.robot), policy, config, n=50).success_rate


def test_a_run_goes_on_from_the_version_that_it_was_rolled_back_to(demos, finished, published, caplog):
    run, begun = finished.run, finished.published
    version = next(v for v, entry in kept_versions(run).items() if entry.step == 40)
    assert version < begun[-1].version
    assert roll_back(run, version)[:2] == (version, 40)
    after, _ = train_local(finished.learner.config, RunOptions([demos], str(run)))
    assert "resumed at step 40, " in caplog.text
    assert (after.updates, after.checkpoints.steps()) == (60, [0, 40, 60])
    # Actors take none that is not newer than theirs.
    assert [p.version for p in [*begun, *published]] == list(range(1, len(begun) + len(published) + 1))
    steps = [r["step"] for r in by_kind(run)["train"]]
    assert steps == sorted(steps)


@pytest.mark.slow  # `make demo` shows it as well
def test_reinforcement_learning_overtakes_the_imitation_it_starts_from(demos, tmp_path):
    config = experiment(
        pretrain_steps=600, warmup_episodes=8, max_steps=3_000, steps_per_update=50, checkpoint_period=0, log_period=200
    )
    learner, _ = train_local(config, RunOptions([demos], str(tmp_path / "run")))
    assert learner.checkpoints.steps() == [0, 3_000]
    imitation, learned = (success_rate(config, tmp_path / "run", step) for step in (0, 3_000))
    assert learned >= 0.8
    assert imitation <= learned - 0.3


# -- a stop or a kill in phases that count no steps: a resume goes on within them --------------------------------------


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
    killed.checkpoints.wait()  # checkpoint 0: none is timed while it is written
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
    policy = LocalPolicy(learner.agent, learner.preprocess, robot_spec(learner.config.robot), seed=11)
    policy.swap(snapshot)
    return [
        policy.decide(Request({STATE: np.array(state, np.float32)}, tick=0, epoch=0, explore=True)).actions
        for state in ([0.5, -0.25], [-0.6, 0.1])
    ]


@pytest.mark.parametrize(("phase", "updates"), [(Phase.WARMUP, 0), (Phase.TRAIN, 30)])
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

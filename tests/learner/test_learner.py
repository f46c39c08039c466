"""The training loop in one process: order, counters, reproducibility, resume, and a policy that learns."""

from __future__ import annotations

import dataclasses
import threading

import pytest
from errors import naming
from learner_tools import agent_of, assert_same_state, by_kind, learner_of, let_go, phases, until
from point_robot import experiment, record_demos

from serl_chunk.actor.policy import ChunkPolicy
from serl_chunk.agents.spec import agent_spec
from serl_chunk.cli.local import train_local
from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.agents.flow import FlowConfig
from serl_chunk.data.preprocess import Preprocess
from serl_chunk.evaluation.rollouts import evaluate
from serl_chunk.learner import training_stats
from serl_chunk.learner.building import RunOptions
from serl_chunk.learner.schedule import Phase
from serl_chunk.replay.replay import Ready, Replay
from serl_chunk.robots.registry import make_env, robot_spec
from serl_chunk.runs.checkpoints import CheckpointStore, kept_versions, roll_back
from serl_chunk.types import ConfigError, Snapshot

pytestmark = [pytest.mark.compiles, pytest.mark.usefixtures("quick")]


def test_phases_counters_and_a_run_that_is_the_same_twice(demos, tmp_path, published):
    config = experiment(critic_pretrain_steps=20)
    (first, summary), (second, _) = (train_local(config, RunOptions([demos], str(tmp_path / n))) for n in "ab")

    # Of the offline phase there are no steps.
    assert phases(tmp_path / "a") == [p for p in Phase if p not in (Phase.PRETRAIN, Phase.OFFLINE)]
    assert first.trainer.phase is Phase.DONE
    assert first.updates == config.learner.max_steps == int(first.state.critic_updates) - 20  # pretrained
    # the limiter: one update per step since the warm-up, and no more steps ahead than permitted
    assert 60 <= first.env_steps <= 60 + 20 + 20 + 2 * 10
    assert (summary.reason, summary.steps) == ("training is complete", first.env_steps)
    assert first.checkpoints.steps() == [0, 40, 60]

    half = len(published) // 2
    assert [p.version for p in published] == 2 * list(range(1, half + 1))
    assert half == 1 + 60 // 20  # after pretraining, every 20 updates

    rows = by_kind(tmp_path / "a")
    assert rows == by_kind(tmp_path / "b")
    assert {"train", "episode", "event"} <= rows.keys()
    assert_same_state(first, second)


def test_a_resumed_run_goes_on(demos, tmp_path, published, caplog):
    run = str(tmp_path / "run")
    before, _ = train_local(experiment(), RunOptions([demos], run))
    begun = list(published)
    assert [p.chooses for p in begun] == [False, *[True] * (len(begun) - 1)]  # imitation, until the critic saw failures
    caplog.clear()
    after, summary = train_local(experiment(max_steps=100), RunOptions([demos], run))
    assert "learner.max_steps: 60 -> 100" in caplog.text
    assert f"resumed at step 60, {before.env_steps} online steps, 12 demonstrations" in caplog.text
    assert (after.trainer.phase, after.updates) == (Phase.DONE, 100)
    assert after.env_steps == before.env_steps + summary.steps
    assert after.episodes == before.episodes + summary.episodes
    assert int(after.state.critic_updates) == int(before.state.critic_updates) + 40
    assert int(after.state.policy_updates) > int(before.state.policy_updates)
    # The store was empty; the steps that fill it again entitle to updates as all others do.
    assert 40 - 20 <= summary.steps <= 40 + 20 + 2
    versions = [p.version for p in published]
    assert versions == sorted(set(versions))
    assert {p.chooses for p in published[len(begun) :]} == {True}
    steps = [r["step"] for r in by_kind(run)["train"]]
    assert steps == sorted(steps)
    of_episodes = [r["phase"] for r in by_kind(run)["episode"]]
    assert of_episodes == sorted(of_episodes, reverse=True)  # the warm-up comes first, and once: not after the resume
    assert set(of_episodes) == {"warmup", "train"}
    assert after.checkpoints.steps() == [0, 40, 60, 80, 100]

    caplog.clear()
    done, summary = train_local(experiment(max_steps=100), RunOptions([demos], run))
    assert "resumed at step 100: training is complete" in caplog.text
    assert (done.updates, summary.steps) == (100, 0)
    assert done.checkpoints.steps() == [0, 40, 60, 80, 100]


def test_a_run_goes_on_from_the_version_that_it_was_rolled_back_to(demos, tmp_path, published, caplog):
    run = tmp_path / "run"
    before, _ = train_local(experiment(), RunOptions([demos], str(run)))
    assert before.checkpoints.steps() == [0, 40, 60]
    # A critic that was never updated chooses nothing.
    assert [p.chooses for p in published] == [False, *[True] * (len(published) - 1)]
    assert [p.step for p in published[:3]] == [0, 20, 40]
    version = next(v for v, entry in kept_versions(run).items() if entry.step == 40)
    assert version < published[-1].version
    assert roll_back(run, version)[:2] == (version, 40)
    after, _ = train_local(experiment(), RunOptions([demos], str(run)))
    assert "resumed at step 40, " in caplog.text
    assert (after.updates, after.checkpoints.steps()) == (60, [0, 40, 60])
    # Actors take none that is not newer than theirs.
    assert [p.version for p in published] == list(range(1, len(published) + 1))
    steps = [r["step"] for r in by_kind(run)["train"]]
    assert steps == sorted(steps)


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


def test_changed_data_do_not_shift_a_resumed_networks_inputs_and_another_transform_is_refused(demos, tmp_path, caplog):
    run, config = tmp_path / "run", experiment()
    before, _ = train_local(config, RunOptions([demos], str(run)))
    kept = (run / "config.json").read_text()
    changed = dataclasses.replace(config, normaliser=dataclasses.replace(config.normaliser, actions="absolute_demo"))
    named = "normaliser.actions", "absolute_demo", "absolute_range", "checkpoint_path"
    with pytest.raises(ConfigError, match=naming(*named)):
        train_local(changed, RunOptions([demos], str(run)))
    assert (run / "config.json").read_text() == kept
    caplog.clear()
    more = record_demos(tmp_path / "more", 3)
    after, _ = train_local(experiment(max_steps=80), RunOptions([more], str(run)))
    said = "the demonstrations or normaliser settings changed since the checkpoint: its normaliser is kept"
    assert said in caplog.text
    assert after.preprocess.digest() == before.preprocess.digest()


def test_a_learner_without_actors_says_that_it_waits(demos, tmp_path, monkeypatch):
    monkeypatch.setattr(training_stats, "MEASURE_AFTER", 0.05)
    learner, stop = learner_of(experiment(), demos, tmp_path / "run"), threading.Event()
    ticks: list[Phase] = []

    def tick() -> None:
        ticks.append(learner.trainer.phase)
        if ticks.count(Phase.WARMUP) == 100:  # so long that what else the machine does counts for little
            stop.set()

    learner.run(stop, tick)
    assert learner.stats.waiting[0] > 0.5
    assert learner.stats.rates["rates/updates_per_s"] == 0  # not those of pretraining
    let_go(learner)


def test_the_status_line_is_told_what_is_waited_for(demos, tmp_path):
    config = experiment(training_starts=100, utd_ratio=0.5, max_lag_steps=40)
    learner = learner_of(config, demos, tmp_path / "run")
    until(learner, Phase.WARMUP)

    def told(steps: int) -> tuple:
        learner.router.env_steps = steps
        fields = learner.status()
        assert "actors" not in fields  # no network
        return fields["steps_missing"], fields["updates_due"], fields["may_record"]

    assert told(30) == (0, 0, None)  # it waits for episodes, of which the line shows how many
    learner.episodes = config.learner.warmup_episodes
    assert told(30) == (70, 0, None)
    learner.trainer.schedule.limiter.start(100)
    learner.trainer.phase = Phase.TRAIN
    assert told(100) == (2 * config.learner.cta_ratio, 0, 40)
    assert told(130) == (0, 15, 10)
    learner.config = dataclasses.replace(config, actor=dataclasses.replace(config.actor, clock="realtime"))
    assert told(130)[2] is None
    let_go(learner)


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
    policy = ChunkPolicy(agent_of(config.agent, agent_spec(config, spec)), preprocess, spec)
    policy.swap(Snapshot(checkpoint.step, checkpoint.params))
    return evaluate(make_env(config.robot), policy, config, n=50).success_rate


@pytest.mark.slow  # `make demo` shows it as well
def test_reinforcement_learning_overtakes_the_imitation_it_starts_from(demos, tmp_path):
    config = experiment(pretrain_steps=600, warmup_episodes=8, max_steps=1_200,
                        steps_per_update=50, checkpoint_period=0, log_period=200)  # fmt: skip
    learner, _ = train_local(config, RunOptions([demos], str(tmp_path / "run")))
    assert learner.checkpoints.steps() == [0, 1_200]
    imitation, learned = (success_rate(config, tmp_path / "run", step) for step in (0, 1_200))
    assert learned >= 0.8
    assert imitation <= learned - 0.3


def test_an_agent_without_a_critic_draws_no_batch_for_one(demos, tmp_path, monkeypatch):
    drawn, sample = [], Replay.sample

    def counted(self, rng, batch_size, updates=None, **kw):
        drawn.append(updates)
        return sample(self, rng, batch_size, updates, **kw)

    monkeypatch.setattr(Replay, "sample", counted)
    config = experiment(cta_ratio=2, critic_pretrain_steps=20)
    config = dataclasses.replace(config, agent=BcConfig(flow=FlowConfig(hidden=(16,), steps=2)))
    learner, _ = train_local(config, RunOptions([demos], str(tmp_path / "run")))
    assert (learner.trainer.phase, learner.updates) == (Phase.DONE, config.learner.max_steps)
    assert drawn.count(20) == config.learner.pretrain_steps // 20  # of the policy's pretraining alone
    assert drawn.count(1) == config.learner.max_steps // 2  # one for each compiled update, not two
    assert set(drawn) == {1, 20}

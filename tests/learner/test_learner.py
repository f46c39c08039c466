"""The training loop in one process: order, counters, reproducibility, resume, and a policy that learns."""

from __future__ import annotations

import dataclasses
import threading

import pytest
from errors import naming
from learner_tools import agent_of, by_kind, quick_agents
from point_robot import experiment, record_demos

from serl_chunk.actor.policy import ChunkPolicy
from serl_chunk.agents.spec import agent_spec
from serl_chunk.cli import learner as learner_command
from serl_chunk.cli.local import LocalLink, train_local
from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.agents.flow import FlowConfig
from serl_chunk.data.preprocess import Preprocess
from serl_chunk.evaluation.rollouts import evaluate
from serl_chunk.learner import training_stats
from serl_chunk.learner.building import RunOptions
from serl_chunk.learner.learner import Learner
from serl_chunk.learner.schedule import Phase
from serl_chunk.replay.replay import Ready, Replay
from serl_chunk.robots.registry import make_env, robot_spec
from serl_chunk.runs.checkpoints import CheckpointStore, host_leaves
from serl_chunk.runs.folder import open_run
from serl_chunk.runs.rollback import kept_versions, roll_back
from serl_chunk.types import ConfigError, Snapshot

pytestmark = pytest.mark.compiles

quick = pytest.fixture(autouse=True)(quick_agents)


@pytest.fixture(scope="module")
def demos(tmp_path_factory) -> str:
    return record_demos(tmp_path_factory.mktemp("demos"), 12)


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Versions in the order in which the actor got them."""
    versions: list[int] = []
    publish = LocalLink.publish

    def record(self, snapshot, info):
        versions.append(snapshot.version)
        publish(self, snapshot, info)

    monkeypatch.setattr(LocalLink, "publish", record)
    return versions


def test_phases_counters_and_a_run_that_is_the_same_twice(demos, tmp_path, published):
    config = experiment(critic_pretrain_steps=20)
    (first, summary), (second, _) = (train_local(config, RunOptions([demos], str(tmp_path / n))) for n in "ab")

    events = [r["text"] for r in by_kind(tmp_path / "a")["event"] if r["text"].startswith("phase: ")]
    order = [p for p in Phase if p not in (Phase.PRETRAIN, Phase.OFFLINE)]  # of the latter there are no steps
    assert events == [f"phase: {p}" for p in order]
    assert first.trainer.phase is Phase.DONE
    assert (
        first.updates == config.learner.max_steps == int(first.state.critic_updates) - 20 - 20
    )  # pretraining, warm-up
    # the limiter: one update per step since the warm-up, and no more steps ahead than permitted
    assert 60 <= first.env_steps <= 60 + 20 + 20 + 2 * 10
    assert summary.reason == "training is complete"
    assert summary.steps == first.env_steps
    assert first.checkpoints.steps() == [0, 40, 60]

    half = len(published) // 2
    assert published[:half] == published[half:] == list(range(1, half + 1))
    assert half == 1 + 1 + 60 // 20  # after pretraining, after the critic's warm-up, every 20 updates

    rows = by_kind(tmp_path / "a")
    assert rows == by_kind(tmp_path / "b")
    assert {"train", "episode", "event"} <= rows.keys()
    a, b = host_leaves(first.state), host_leaves(second.state)
    assert a.keys() == b.keys()
    for path in a:
        assert a[path].tobytes() == b[path].tobytes(), path


def test_a_resumed_run_goes_on(demos, tmp_path, published, caplog):
    run = str(tmp_path / "run")
    before, _ = train_local(experiment(), RunOptions([demos], run))
    versions = list(published)
    caplog.clear()
    after, summary = train_local(experiment(max_steps=100), RunOptions([demos], run))
    said = caplog.text
    assert "learner.max_steps: 60 -> 100" in said
    assert f"resumed at step 60, {before.env_steps} online steps, 12 demonstrations" in said
    assert (after.trainer.phase, after.updates) == (Phase.DONE, 100)
    assert after.env_steps == before.env_steps + summary.steps
    assert after.episodes == before.episodes + summary.episodes
    assert int(after.state.critic_updates) == int(before.state.critic_updates) + 40
    assert int(after.state.policy_updates) > int(before.state.policy_updates)
    # The store was empty; the steps that fill it again entitle to updates as all others do.
    assert 40 - 20 <= summary.steps <= 40 + 20 + 2
    assert published == sorted(set(published))
    assert published[len(versions)] > versions[-1]
    steps = [r["step"] for r in by_kind(run)["train"]]
    assert steps == sorted(steps)
    phases = [r["phase"] for r in by_kind(run)["episode"]]
    assert phases == sorted(phases, reverse=True)  # the warm-up comes first, and once: not after the resume
    assert set(phases) == {"warmup", "train"}
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
    newest = published[-1]
    version = next(v for v, entry in kept_versions(run).items() if entry.step == 40)
    assert version < newest
    assert roll_back(run, version)[:2] == (version, 40)
    after, _ = train_local(experiment(), RunOptions([demos], str(run)))
    assert "resumed at step 40, " in caplog.text
    assert (after.updates, after.checkpoints.steps()) == (60, [0, 40, 60])
    assert published == list(range(1, len(published) + 1))  # actors take none that is not newer than theirs
    assert [r["step"] for r in by_kind(run)["train"]] == sorted(r["step"] for r in by_kind(run)["train"])


def test_a_resumed_policy_chooses_with_its_trained_critic(demos, tmp_path, monkeypatch):
    chooses: list[bool] = []
    publish = LocalLink.publish

    def record(self, snapshot, info):
        chooses.append(bool(snapshot.params["critic_chooses"]))
        publish(self, snapshot, info)

    monkeypatch.setattr(LocalLink, "publish", record)
    run = str(tmp_path / "run")
    train_local(experiment(), RunOptions([demos], run))
    assert not chooses[0]  # imitation alone, until the critic has seen failures
    assert set(chooses[1:]) == {True}
    chooses.clear()
    train_local(experiment(max_steps=80), RunOptions([demos], run))
    assert set(chooses) == {True}


def test_a_critic_that_was_never_updated_chooses_nothing(demos, tmp_path, monkeypatch):
    published: list[tuple[int, bool]] = []
    publish = LocalLink.publish

    def record(self, snapshot, info):
        published.append((info["step"], bool(snapshot.params["critic_chooses"])))
        publish(self, snapshot, info)

    monkeypatch.setattr(LocalLink, "publish", record)
    train_local(experiment(critic_warmup_steps=0), RunOptions([demos], str(tmp_path / "run")))
    before = [chooses for step, chooses in published if step == 0]
    assert before == [False, False]  # when the actors begin, and when training does
    assert {chooses for step, chooses in published if step} == {True}


def test_training_waits_where_everything_was_discarded(demos, tmp_path, monkeypatch, caplog):
    learner = build(experiment(), demos, tmp_path / "run")
    learner.trainer.schedule.limiter.start(0)
    learner.router.env_steps, learner.trainer.phase = 100, Phase.TRAIN
    caplog.clear()
    monkeypatch.setattr(Replay, "ready", property(lambda self: Ready(100, 0, 0, 0)))
    assert learner.work()
    assert learner.trainer.phase is Phase.WARMUP
    assert caplog.messages[0].startswith("the replay has no window left to train on")
    assert not learner.work()
    learner.close()
    learner.metrics.close()


def test_pretraining_without_demonstrations_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(ConfigError, match=naming("demo_path", "learner.pretrain_steps", 0)):
        train_local(experiment(), RunOptions([], str(tmp_path / "run")))
    learner, _ = train_local(
        experiment(pretrain_steps=0, critic_warmup_steps=0, max_steps=20), RunOptions([], str(tmp_path / "other"))
    )
    assert learner.updates == 20


def test_changed_demonstrations_do_not_shift_a_resumed_networks_inputs(demos, tmp_path, caplog):
    run = str(tmp_path / "run")
    before, _ = train_local(experiment(), RunOptions([demos], run))
    caplog.clear()
    after, _ = train_local(experiment(max_steps=80), RunOptions([record_demos(tmp_path / "more", 3)], run))
    said = "the demonstrations or normaliser settings changed since the checkpoint: its normaliser is kept"
    assert said in caplog.text
    assert after.preprocess.digest() == before.preprocess.digest()


def test_another_transform_of_actions_is_refused_on_resume(demos, tmp_path):
    run = tmp_path / "run"
    config = experiment()
    train_local(config, RunOptions([demos], str(run)))
    kept = (run / "config.json").read_text()
    other = "absolute_demo" if config.normaliser.actions != "absolute_demo" else "relative"
    changed = dataclasses.replace(config, normaliser=dataclasses.replace(config.normaliser, actions=other))
    with pytest.raises(
        ConfigError, match=naming("normaliser.actions", other, config.normaliser.actions, "checkpoint_path")
    ):
        train_local(changed, RunOptions([demos], str(run)))
    assert (run / "config.json").read_text() == kept


def build(config, demos, run, *, threaded=False, publish=lambda snapshot, info: None) -> Learner:
    """A learner on its own: no actor, no sockets."""
    spec = robot_spec(config.robot)
    folder = open_run(config, spec, str(run))
    return learner_command.make_learner(config, RunOptions([demos]), folder, spec, publish=publish, threaded=threaded)


def test_a_learner_without_actors_says_that_it_waits(demos, tmp_path, monkeypatch):
    monkeypatch.setattr(training_stats, "MEASURE_AFTER", 0.05)
    learner, stop = build(experiment(), demos, tmp_path / "run"), threading.Event()
    ticks: list[Phase] = []

    def tick() -> None:
        ticks.append(learner.trainer.phase)
        if ticks.count(Phase.WARMUP) == 100:  # so long that what else the machine does counts for little
            stop.set()

    learner.run(stop, tick)
    assert learner.stats.waiting[0] > 0.5
    assert learner.stats.rates["rates/updates_per_s"] == 0  # not those of pretraining
    learner.close()
    learner.metrics.close()


def test_the_status_line_is_told_what_is_waited_for(demos, tmp_path):
    config = experiment(training_starts=100, utd_ratio=0.5, max_lag_steps=40)
    learner = build(config, demos, tmp_path / "run")
    while learner.trainer.phase is not Phase.WARMUP:
        learner.work()

    def told() -> tuple:
        fields = learner.status()
        assert "actors" not in fields  # no network
        return fields["steps_missing"], fields["updates_due"], fields["may_record"]

    learner.router.env_steps = 30
    assert told() == (0, 0, None)  # it waits for episodes, of which the line shows how many
    learner.episodes = config.learner.warmup_episodes
    assert told() == (70, 0, None)
    learner.trainer.schedule.limiter.start(100)
    learner.trainer.phase = Phase.TRAIN
    learner.router.env_steps = 100
    assert told() == (2 * config.learner.cta_ratio, 0, 40)
    learner.router.env_steps = 130
    assert told() == (0, 15, 10)
    learner.config = dataclasses.replace(config, actor=dataclasses.replace(config.actor, clock="realtime"))
    assert learner.status()["may_record"] is None
    learner.close()
    learner.metrics.close()


def test_a_phase_trains_on_nothing_that_was_drawn_in_the_one_before(demos, tmp_path):
    learner = build(experiment(), demos, tmp_path / "run", threaded=True)

    def drawing():
        return any(thread.name.startswith("batches") for thread in threading.enumerate())

    seen = False
    while learner.trainer.phase is not Phase.WARMUP:
        learner.work()
        seen |= drawing()
    assert seen
    assert not drawing()
    learner.close()
    learner.metrics.close()


def test_a_last_snapshot_that_was_not_handed_over_is_logged(demos, tmp_path, caplog):
    def broken(snapshot, info):
        raise OSError("the socket is gone")

    learner = build(experiment(), demos, tmp_path / "run", threaded=True, publish=broken)
    while learner.trainer.phase is not Phase.WARMUP:
        learner.work()
    learner.close()
    learner.metrics.close()
    assert "the newest snapshot did not reach the actors (OSError: the socket is gone)" in caplog.messages


def success_rate(config, run, step: int) -> float:
    """Of one checkpoint's mean policy on 50 held-out starts."""
    checkpoint = CheckpointStore(run).restore_policy(step)
    spec = robot_spec(config.robot)
    preprocess = Preprocess.restored(config, spec, checkpoint.meta, checkpoint.normaliser)
    policy = ChunkPolicy(agent_of(config.agent, agent_spec(config, spec)), preprocess, spec)
    policy.swap(Snapshot(checkpoint.step, checkpoint.params))
    env = make_env(config.robot)
    return evaluate(env, policy, config, n=50).success_rate


@pytest.mark.slow  # `make demo` shows it as well
def test_reinforcement_learning_overtakes_the_imitation_it_starts_from(demos, tmp_path):
    config = experiment(pretrain_steps=600, critic_warmup_steps=100, warmup_episodes=8, max_steps=1_200,
                        steps_per_update=50, checkpoint_period=0, log_period=200)  # fmt: skip
    learner, _ = train_local(config, RunOptions([demos], str(tmp_path / "run")))
    assert learner.checkpoints.steps() == [0, 1_200]
    imitation, learned = (success_rate(config, tmp_path / "run", step) for step in (0, 1_200))
    assert learned >= 0.8
    assert imitation <= learned - 0.3


def test_an_agent_without_a_critic_draws_no_batch_for_one(demos, tmp_path, monkeypatch):
    drawn = []
    sample = Replay.sample

    def counted(self, rng, batch_size, updates=None, **kw):
        drawn.append(updates)
        return sample(self, rng, batch_size, updates, **kw)

    monkeypatch.setattr(Replay, "sample", counted)
    config = experiment(cta_ratio=2, critic_pretrain_steps=20, critic_warmup_steps=20)
    config = dataclasses.replace(config, agent=BcConfig(flow=FlowConfig(hidden=(16,), steps=2)))
    learner, _ = train_local(config, RunOptions([demos], str(tmp_path / "run")))
    assert (learner.trainer.phase, learner.updates) == (Phase.DONE, config.learner.max_steps)
    assert drawn.count(20) == config.learner.pretrain_steps // 20  # of the policy's pretraining alone
    assert drawn.count(1) == config.learner.max_steps // 2  # one for each compiled update, not two
    assert set(drawn) == {1, 20}

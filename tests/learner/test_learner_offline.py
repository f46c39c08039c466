"""The offline phase: offline to online, offline only, and going on in the middle of it."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import numpy as np
import pytest
from learner_tools import by_kind, learner_of, let_go, quick_agents
from point_robot import experiment, record_demos

from serl_chunk.cli.learner import make_learner, train_offline
from serl_chunk.cli.local import LocalLink, train_local
from serl_chunk.data.demos import load_demos
from serl_chunk.learner import demo_options as demos_command
from serl_chunk.learner.building import RunOptions
from serl_chunk.learner.demo_options import DemoOptions
from serl_chunk.learner.learner import Learner
from serl_chunk.learner.schedule import Phase
from serl_chunk.learner.trainers.phases import PhaseTrainer
from serl_chunk.learner.training_stats import TrainingStats
from serl_chunk.robots.registry import robot_spec
from serl_chunk.runs.checkpoints import host_leaves
from serl_chunk.runs.folder import open_run, read_config
from serl_chunk.types import Outcome, Snapshot

pytestmark = pytest.mark.compiles

OFFLINE = {"pretrain_steps": 0, "offline_steps": 40, "online_steps": 0, "checkpoint_period": 20}

quick = pytest.fixture(autouse=True)(quick_agents)


@pytest.fixture(scope="module")
def demos(tmp_path_factory) -> str:
    return record_demos(tmp_path_factory.mktemp("demos"), 12)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the demonstrations were no success after all."""

    def with_failures(*args, **kwargs):
        loaded = load_demos(*args, **kwargs)
        for i in range(0, len(loaded.episodes), 2):
            begin, steps, end = loaded.episodes[i]
            steps = dataclasses.replace(steps, reward=np.zeros_like(steps.reward))
            end = end._replace(outcome=Outcome.UNKNOWN, terminated=False, truncated=True, reward=None)
            loaded.episodes[i] = loaded.episodes[i]._replace(begin=begin, steps=steps, end=end)
        return loaded

    monkeypatch.setattr(demos_command, "load_demos", with_failures)


@pytest.fixture
def chooses(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the critic chooses among the candidates of each published policy."""
    published: list[bool] = []
    publish = LocalLink.publish

    def record(self: LocalLink, snapshot: Snapshot, info: dict) -> None:
        published.append(bool(snapshot.params["critic_chooses"]))
        publish(self, snapshot, info)

    monkeypatch.setattr(LocalLink, "publish", record)
    return published


def same_state(a: Learner, b: Learner) -> None:
    left, right = host_leaves(a.state), host_leaves(b.state)
    assert left.keys() == right.keys()
    for path in left:
        assert left[path].tobytes() == right[path].tobytes(), path


def phases(run: Path) -> list[str]:
    return [r["text"].removeprefix("phase: ") for r in by_kind(run)["event"] if r["text"].startswith("phase: ")]


def test_offline_to_online_keeps_everything_and_counts_apart(demos, tmp_path, chooses):
    config = experiment(offline_steps=40, max_steps=60)
    learner, summary = train_local(config, RunOptions([demos], str(tmp_path)))
    assert phases(tmp_path) == ["critic pretrain", "offline", "warm-up", "critic warm-up", "train", "done"]
    assert (learner.trainer.offline_updates, learner.trainer.online_updates, learner.updates) == (40, 60, 100)
    # Pretraining of the policy alone comes on top, and the critic's warm-up: the optimiser has seen them all.
    assert int(learner.state.critic_updates) == 40 + 20 + 60
    assert int(learner.state.policy_updates) == 40 + 40 + 60
    # The limiter counts online updates only: one a step since the warm-up.
    assert 60 <= learner.env_steps <= 60 + 20 + 20 + 2 * 10
    assert learner.checkpoints.steps() == [0, 40, 80, 100]
    assert summary.reason == "training is complete"
    rows = by_kind(tmp_path)["train"]
    assert [r["step"] for r in rows if r["env_steps"] == 0][-1] == 40
    assert not chooses[0]  # demonstrations that all succeed teach a critic nothing about failure
    assert set(chooses[1:]) == {True}


def test_a_critic_that_has_seen_failures_offline_chooses_at_once(demos, tmp_path, chooses, failing):
    train_local(experiment(offline_steps=40, max_steps=20), RunOptions([demos], str(tmp_path)))
    assert set(chooses) == {True}


def test_training_ends_after_so_many_online_steps_and_their_updates(demos, tmp_path):
    config = experiment(offline_steps=20, online_steps=61, max_steps=100_000, utd_ratio=0.5, max_lag_steps=10,
                        checkpoint_period=0)  # fmt: skip
    learner, _ = train_local(config, RunOptions([demos], str(tmp_path)))
    assert learner.trainer.phase is Phase.DONE
    assert 61 <= learner.env_steps <= 61 + 2  # it acts in chunks of 2
    begun = next(r for r in by_kind(tmp_path)["event"] if r["text"] == "phase: critic warm-up")["env_steps"]
    assert learner.trainer.online_updates == (61 - begun) // 2
    again, summary = train_local(config, RunOptions([demos], str(tmp_path)))
    assert (again.trainer.phase, again.updates, summary.steps) == (Phase.DONE, learner.updates, 0)


def test_actors_may_record_no_more_steps_than_training_wants(demos, tmp_path):
    config = experiment(online_steps=50, training_starts=20)
    spec = robot_spec(config.robot)
    learner = make_learner(
        config, RunOptions([demos]), open_run(config, spec, str(tmp_path)), spec,
        publish=lambda snapshot, info: None, threaded=False,
    )  # fmt: skip
    learner.router.env_steps = 20
    assert learner.trainer.steps_allowed() == 30
    learner.trainer.schedule.limiter.start(20)
    assert learner.trainer.steps_allowed() == 20  # max_lag_steps
    learner.router.env_steps = 70  # a realtime actor does not wait
    assert (learner.trainer.steps_allowed(), learner.trainer.schedule.updates_due) == (0, 30)
    learner.close()
    learner.metrics.close()


def test_offline_only_and_on_from_there(demos, tmp_path, caplog):
    run = tmp_path / "run"
    learner = train_offline(experiment(**OFFLINE), RunOptions([demos], str(run)))
    assert (learner.trainer.phase, learner.updates, learner.env_steps) == (Phase.DONE, 40, 0)
    assert phases(run) == ["critic pretrain", "offline", "done"]
    assert learner.checkpoints.steps() == [0, 20, 40]

    caplog.clear()
    done = train_offline(experiment(**OFFLINE), RunOptions([demos], str(run)))
    assert (done.trainer.phase, done.updates) == (Phase.DONE, 40)
    said = caplog.text
    assert "resumed at step 40: training is complete (raise learner.offline_steps to go on, or do not set" in said

    longer = train_offline(experiment(**OFFLINE | {"offline_steps": 60}), RunOptions([demos], str(run)))
    assert (longer.trainer.phase, longer.updates, int(longer.state.critic_updates)) == (Phase.DONE, 60, 60)

    online, _ = train_local(
        experiment(**OFFLINE | {"offline_steps": 60, "online_steps": None, "max_steps": 20}),
        RunOptions([demos], str(run)),
    )
    assert (online.trainer.phase, online.trainer.offline_updates, online.trainer.online_updates) == (Phase.DONE, 60, 20)
    assert int(online.state.critic_updates) == 60 + 20 + 20


def test_a_run_stopped_offline_goes_on_as_if_it_had_not_been(demos, tmp_path):
    whole = train_offline(experiment(**OFFLINE), RunOptions([demos], str(tmp_path / "whole")))
    stop, run = threading.Event(), str(tmp_path / "stopped")
    update = PhaseTrainer._update

    def stopping(self: PhaseTrainer) -> None:
        update(self)
        if self._learner.updates == 25:
            stop.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PhaseTrainer, "_update", stopping)
        half = train_offline(experiment(**OFFLINE), RunOptions([demos], run), stop=stop)
    assert (half.trainer.phase, half.updates) == (Phase.OFFLINE, 25)
    assert half.checkpoints.steps() == [0, 20, 25]
    rest = train_offline(experiment(**OFFLINE), RunOptions([demos], run))
    assert (rest.trainer.phase, rest.updates, rest.trainer.offline_updates) == (Phase.DONE, 40, 40)
    same_state(whole, rest)


def test_a_run_that_was_killed_offline_goes_on_from_its_newest_checkpoint(demos, tmp_path):
    whole = train_offline(experiment(**OFFLINE), RunOptions([demos], str(tmp_path / "whole")))

    class Killed(Exception):
        pass

    update, close = PhaseTrainer._update, Learner.close

    def killed(self: PhaseTrainer) -> None:
        update(self)
        if self._learner.updates == 25:
            raise Killed

    def let_go(self: Learner) -> None:  # a killed process writes nothing more
        self.checkpoint = lambda **_: True
        close(self)

    run = str(tmp_path / "killed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PhaseTrainer, "_update", killed)
        patch.setattr(Learner, "close", let_go)
        with pytest.raises(Killed):
            train_offline(experiment(**OFFLINE), RunOptions([demos], run))
    rest = train_offline(experiment(**OFFLINE), RunOptions([demos], run))
    assert rest.checkpoints.steps() == [0, 20, 40]
    same_state(whole, rest)
    steps = [r["step"] for r in by_kind(Path(run))["train"]]
    assert steps == sorted(set(steps))  # what the lost life logged after its checkpoint does not count


@pytest.mark.parametrize("fraction", [0.5, "uniform"])
def test_the_data_stay_whatever_comes_online(demos, tmp_path, fraction):
    config = experiment(offline_steps=20, max_steps=150)
    config = dataclasses.replace(
        config, replay=dataclasses.replace(config.replay, demo_fraction=fraction, capacity=60, demo_capacity=300)
    )
    learner, _ = train_local(config, RunOptions([demos], str(tmp_path)))
    stats = learner.replay.stats()
    assert learner.env_steps > 60  # the ring has turned
    assert stats["replay/evicted_episodes"] > 0
    assert sum(session == "demonstrations" for session, _ in learner.replay.episodes()) == 12
    if fraction == "uniform":
        assert "replay/demo_share" not in stats  # drawn as one buffer: by how many windows there are


def write_shards(folder: Path, count: int) -> str:
    """OGBench files of two trajectories each, in the first of which the point arrives."""
    folder.mkdir()
    for shard in range(count):
        rng = np.random.default_rng(shard)
        n = 8
        rewards = np.full((2, n), -1.0, np.float32)
        rewards[0, -1] = 0.0  # OGBench's own: 0 in a solved state
        np.savez(
            folder / f"point-{shard:03d}.npz",
            observations=rng.normal(size=(2 * n, 2)).astype(np.float32),
            actions=rng.uniform(-0.9, 0.9, (2 * n, 2)).astype(np.float32),
            terminals=np.tile(np.arange(n) == n - 1, 2).astype(np.float32),
            rewards=rewards.ravel(),
            masks=(rewards.ravel() < 0).astype(np.float32),
        )
    return str(folder)


def test_shards_take_turns_and_a_resume_finds_the_right_one(demos, tmp_path):
    demo_options = DemoOptions(dataset=write_shards(tmp_path / "shards", 3))
    config = experiment(**OFFLINE | {"offline_steps": 35})
    config = dataclasses.replace(config, replay=dataclasses.replace(config.replay, dataset_replace_interval=10))
    seen: dict[int, tuple[str, ...]] = {}
    update = PhaseTrainer._update

    def watched(self: PhaseTrainer) -> None:
        seen[self._learner.updates] = tuple(
            sorted(e for s, e in self._learner.replay.episodes() if s != "demonstrations")
        )
        assert sum(s == "demonstrations" for s, _ in self._learner.replay.episodes()) == 12  # those of --demo_path stay
        update(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PhaseTrainer, "_update", watched)
        whole = train_offline(config, RunOptions([demos], str(tmp_path / "whole"), demo_options=demo_options))
        turns = [seen[step] for step in (0, 10, 20, 30)]
        assert all(seen[step] == turns[step // 10] for step in range(35))
        assert len(set(turns[:3])) == 3  # each once before one comes again
        first = dict(seen)
        run, stop = str(tmp_path / "run"), threading.Event()
        half = dataclasses.replace(config, learner=dataclasses.replace(config.learner, offline_steps=25))
        train_offline(half, RunOptions([demos], run, demo_options=demo_options), stop=stop)
        seen.clear()
        rest = train_offline(config, RunOptions([demos], run, demo_options=demo_options))
    assert seen == {step: first[step] for step in range(25, 35)}
    same_state(whole, rest)


def test_what_was_applied_is_recorded(demos, tmp_path):
    config = dataclasses.replace(experiment(**OFFLINE | {"offline_steps": 1}), preset="qc", compat="qc")
    train_offline(config, RunOptions([demos], str(tmp_path)))
    saved = read_config(tmp_path)
    assert (saved["preset"], saved["compat"]) == ("qc", "qc")


def records(config, demos: str, steps: int) -> list[tuple[int, str, object]]:
    """A journal of episodes with at least so many steps: those of the demonstrations, again and again."""
    out: list[tuple[int, str, object]] = []
    episodes = load_demos([demos], robot_spec(config.robot)).episodes
    while steps > 0:
        begin, block, end = episodes[len(out) // 3 % len(episodes)]
        name = f"x{len(out)}"
        for r in (begin._replace(episode_id=name), dataclasses.replace(block, episode_id=name)):
            out.append((len(out), "actor/s", r))
        out.append((len(out), "actor/s", end._replace(episode_id=name)))
        steps -= block.n
    return out


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_update_that_was_interrupted_does_not_end_the_offline_phase(demos, tmp_path, error):
    counted, calls = TrainingStats.updated, []

    def interrupted(self: TrainingStats, updates: int, metrics: dict) -> None:
        counted(self, updates, metrics)
        calls.append(updates)
        if sum(calls) == 25:
            raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingStats, "updated", interrupted)
        with pytest.raises(error):
            train_offline(experiment(**OFFLINE), RunOptions([demos], str(tmp_path)))
    rest = train_offline(experiment(**OFFLINE), RunOptions([demos], str(tmp_path)))
    assert (rest.trainer.phase, rest.updates, rest.trainer.offline_updates) == (Phase.DONE, 40, 40)


def test_updates_still_owed_when_the_last_step_came_are_done_after_a_resume(demos, tmp_path):
    config = experiment(pretrain_steps=0, critic_warmup_steps=0, warmup_episodes=0, training_starts=20,
                        online_steps=100, max_lag_steps=200, max_steps=100_000, checkpoint_period=0)  # fmt: skip
    journal = records(config, demos, 120)  # realtime: it runs ahead
    first = learner_of(config, demos, tmp_path)
    while first.trainer.phase is not Phase.WARMUP:
        first.work()
    number = 0
    while first.env_steps < 20:
        number += 1
        first.router.insert("actor/s", journal[number - 1][2], number)
    while first.trainer.phase is not Phase.TRAIN:
        first.work()
    begun = first.env_steps
    for i in range(number, len(journal)):
        first.router.insert("actor/s", journal[i][2], i + 1)
    for _ in range(10):
        first.work()
    assert first.env_steps > 100
    assert first.status()["total"] == 100 - begun
    assert (first.trainer.online_updates, first.trainer.schedule.updates_due) == (10, 100 - begun - 10)
    let_go(first)

    second = learner_of(config, demos, tmp_path)
    second.refill(journal)
    while second.trainer.phase is not Phase.TRAIN:
        assert second.work()
    assert second.trainer.schedule.updates_due == 100 - begun - 10
    for _ in range(10):
        second.work()
    let_go(second)
    third = learner_of(config, demos, tmp_path)
    third.refill(journal)
    while third.trainer.phase is not Phase.DONE:
        assert third.work()
    assert third.trainer.online_updates == 100 - begun
    let_go(third)
    again = learner_of(config, demos, tmp_path)
    assert again.trainer.phase is Phase.DONE
    let_go(again)


def test_owed_updates_without_their_steps_end_with_a_word(demos, tmp_path, caplog):
    config = experiment(pretrain_steps=0, warmup_episodes=0, critic_warmup_steps=0, training_starts=20,
                        online_steps=60, max_lag_steps=200, max_steps=100_000, checkpoint_period=0)  # fmt: skip
    learner = learner_of(config, demos, tmp_path)
    for number, session, record in records(config, demos, 20):
        learner.router.insert(session, record, number + 1)
    while learner.trainer.phase is not Phase.TRAIN:
        learner.work()
    for i, (_, _, record) in enumerate(records(config, demos, 60)):
        learner.router.insert("other/s", record, 100 + i)
    learner.work()
    let_go(learner)
    caplog.clear()
    resumed = learner_of(config, demos, tmp_path)
    while resumed.trainer.phase is not Phase.DONE:
        assert resumed.work()
    assert "the online replay has no window to train on. Raise learner.online_steps to go on" in caplog.text
    let_go(resumed)


def test_a_warm_up_that_takes_all_online_steps_is_cut_short(demos, tmp_path, caplog):
    config = experiment(pretrain_steps=0, online_steps=50, training_starts=20, warmup_episodes=20)
    learner, _ = train_local(config, RunOptions([demos], str(tmp_path)))
    assert (learner.trainer.phase, learner.trainer.online_updates) == (Phase.DONE, 50 - 20)
    said = caplog.text
    assert "the warm-up ends early: all 50 online steps came, in 5 of learner.warmup_episodes=20" in said


def test_the_last_steps_of_a_resumed_run_without_a_journal_are_trained_on(demos, tmp_path):
    config = experiment(pretrain_steps=0, critic_warmup_steps=0, online_steps=120, training_starts=40,
                        warmup_episodes=0, max_steps=100_000, checkpoint_period=0)  # fmt: skip
    stop, update = threading.Event(), PhaseTrainer._update

    def stopping(self: PhaseTrainer) -> None:
        update(self)
        if self._learner.env_steps >= 100:
            stop.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PhaseTrainer, "_update", stopping)
        before, _ = train_local(config, RunOptions([demos], str(tmp_path)), stop=stop)
    assert before.trainer.phase is Phase.TRAIN
    learner, summary = train_local(config, RunOptions([demos], str(tmp_path)))
    assert summary.steps <= 20 + 2  # fewer than training_starts
    assert (learner.trainer.phase, learner.trainer.online_updates) == (Phase.DONE, 80)


@pytest.mark.parametrize("replay", [{}, {"demo_fraction": "uniform"}, {"windows": "qc", "terminal_windows": "drop"}])
def test_an_offline_phase_that_is_prolonged_sees_no_online_step(demos, tmp_path, replay):
    config = experiment(pretrain_steps=0, offline_steps=10, warmup_episodes=5, checkpoint_period=0)
    config = dataclasses.replace(config, replay=dataclasses.replace(config.replay, **replay))
    journal = records(config, demos, 30)
    first = learner_of(config, demos, tmp_path)
    while first.trainer.phase is not Phase.WARMUP:
        first.work()
    for number, session, record in journal:
        first.router.insert(session, record, number + 1)
    let_go(first)

    learner = learner_of(
        dataclasses.replace(config, learner=dataclasses.replace(config.learner, offline_steps=20)), demos, tmp_path
    )
    learner.refill(journal)
    assert learner.replay.ready.online > 0
    assert (learner.trainer.phase, learner.trainer.steps_allowed()) == (Phase.OFFLINE, 0)
    for episode in learner.replay._partitions.online.episodes.values():  # seen in a batch, it would spoil the networks
        learner.replay._partitions.storage.steps.state[episode.rows] = np.nan
    while learner.trainer.phase is Phase.OFFLINE:
        learner.work()
    assert learner.trainer.offline_updates == 20
    assert all(np.isfinite(leaf).all() for leaf in host_leaves(learner.state).values() if leaf.dtype.kind == "f")
    assert learner.trainer.steps_allowed() is None
    let_go(learner)


def test_after_online_updates_more_offline_ones_are_no_remedy(demos, tmp_path, caplog):
    train_local(experiment(pretrain_steps=0, max_steps=10, checkpoint_period=0), RunOptions([demos], str(tmp_path)))
    caplog.clear()
    done = train_offline(experiment(**OFFLINE), RunOptions([demos], str(tmp_path)))
    assert (done.trainer.phase, done.trainer.offline_updates) == (Phase.DONE, 0)
    said = caplog.text
    assert "after online updates the offline phase is over; do not set learner.online_steps=0 to go on online" in said
    assert "raise learner.offline_steps" not in said

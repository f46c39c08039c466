"""The offline phase: offline to online, offline only, and going on in the middle of it."""

from __future__ import annotations

import dataclasses
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from learner_tools import assert_same_state, by_kind, feed, journal_of, learner_of, let_go, phases, quick_agent, until
from point_robot import experiment

from serl_chunk.cli.learner import train_offline
from serl_chunk.cli.local import train_local
from serl_chunk.config.overrides import apply_overrides
from serl_chunk.learner import building
from serl_chunk.learner.building import RunOptions
from serl_chunk.learner.learner import Learner
from serl_chunk.learner.offline_data import DemoOptions
from serl_chunk.learner.schedule import Phase
from serl_chunk.learner.trainers.phases import PhaseTrainer
from serl_chunk.learner.training_stats import TrainingStats
from serl_chunk.runs.checkpoints import CheckpointStore, host_leaves
from serl_chunk.runs.evaluations import wanted_policy
from serl_chunk.runs.folder import read_config
from serl_chunk.types import SerlChunkError

pytestmark = [pytest.mark.compiles, pytest.mark.usefixtures("quick")]

OFFLINE = {"pretrain_steps": 0, "offline_steps": 40, "online_steps": 0, "checkpoint_period": 20}
ONLINE = {"pretrain_steps": 0, "warmup_episodes": 0, "max_steps": 100_000, "checkpoint_period": 0, "max_lag_steps": 200}


def offline(demos: str, run: Path, *, stop: threading.Event | None = None, **changes) -> Learner:
    config = experiment(**OFFLINE | changes)
    return train_offline(config, RunOptions([demos], str(run)), **({"stop": stop} if stop else {}))


def after_updates(patch: pytest.MonkeyPatch, call: Callable[[PhaseTrainer], None]) -> None:
    """`call` the trainer after each update."""
    update = PhaseTrainer._update
    patch.setattr(PhaseTrainer, "_update", lambda self: call(update(self) or self))


@pytest.fixture(scope="module")
def once(demos, tmp_path_factory) -> tuple[Path, Learner]:
    run = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "make_agent", quick_agent)
        return run, offline(demos, run)


@pytest.fixture
def whole(once) -> Learner:
    """Of an offline run that nothing interrupted."""
    return once[1]


def test_offline_to_online_keeps_everything_and_counts_apart(demos, tmp_path, published):
    learner, summary = train_local(experiment(offline_steps=40, max_steps=60), RunOptions([demos], str(tmp_path)))
    assert phases(tmp_path) == ["critic pretrain", "offline", "warm-up", "train", "done"]
    assert (learner.trainer.offline_updates, learner.trainer.online_updates, learner.updates) == (40, 60, 100)
    # Pretraining of the policy alone comes on top: the optimiser has seen it all.
    assert int(learner.state.critic_updates) == 40 + 60
    assert int(learner.state.policy_updates) == 40 + 40 + 60
    # The limiter counts online updates only: one a step since the warm-up.
    assert 60 <= learner.env_steps <= 60 + 20 + 20 + 2 * 10
    assert learner.checkpoints.steps() == [0, 40, 80, 100]
    assert summary.reason == "training is complete"
    assert [r["step"] for r in by_kind(tmp_path)["train"] if r["env_steps"] == 0][-1] == 40
    # Demonstrations that all succeed teach a critic nothing about failure.
    assert [p.chooses for p in published] == [False, *[True] * (len(published) - 1)]


def test_training_ends_after_so_many_online_steps_and_their_updates(demos, tmp_path):
    config = experiment(
        offline_steps=20, online_steps=61, max_steps=100_000, utd_ratio=0.5, max_lag_steps=10, checkpoint_period=0
    )
    learner, _ = train_local(config, RunOptions([demos], str(tmp_path)))
    assert learner.trainer.phase is Phase.DONE
    assert 61 <= learner.env_steps <= 61 + 2  # it acts in chunks of 2
    begun = next(r for r in by_kind(tmp_path)["event"] if r["text"] == "phase: train")["env_steps"]
    assert learner.trainer.online_updates == (61 - begun) // 2
    again, summary = train_local(config, RunOptions([demos], str(tmp_path)))
    assert (again.trainer.phase, again.updates, summary.steps) == (Phase.DONE, learner.updates, 0)


def test_a_run_starts_from_the_policy_and_the_normaliser_of_another(once, tmp_path):
    folder, other = once[0], once[1]
    step = other.checkpoints.steps()[1]
    config = experiment(**ONLINE | {"start_from": f"{folder}:{step}"})
    learner = learner_of(config, None, tmp_path)
    saved = wanted_policy(folder, CheckpointStore(folder), str(step)).params
    policy = learner.agent.flatten_params(learner.agent.published(learner.state, learner.base))
    assert all(np.array_equal(policy[k], v) for k, v in saved.items() if k.startswith("policy/"))
    assert learner.preprocess.digest() == other.preprocess.digest()
    learner.checkpoint()
    let_go(learner)
    resumed = learner_of(experiment(**ONLINE | {"start_from": "removed"}), None, tmp_path)
    assert resumed.preprocess.digest() == other.preprocess.digest()
    let_go(resumed)


@pytest.mark.parametrize(
    ("start", "changes", "message"),
    [
        ("nowhere", {}, "nowhere is no run folder. Give the --checkpoint_path of a run"),
        ("RUN:7", {}, "has no checkpoint '7'; it has: 0, 20, 40"),
        (
            "RUN",
            {"normaliser.actions": "relative"},
            "was trained with normaliser.actions=absolute_range, and this run has",
        ),
        ("RUN", {"chunk.horizon": 3}, "this agent's is"),
    ],
)
def test_a_policy_that_a_run_cannot_start_from_is_refused(once, tmp_path, start, changes, message):
    config = apply_overrides(
        experiment(**ONLINE | {"start_from": start.replace("RUN", str(once[0]))}),
        [(k, str(v)) for k, v in changes.items()],
    )
    with pytest.raises(SerlChunkError, match=re.escape(message)):
        learner_of(config, None, tmp_path)


def test_offline_only_and_on_from_there(demos, once, tmp_path, caplog):
    learner = once[1]
    shutil.copytree(once[0], tmp_path, dirs_exist_ok=True)
    assert (learner.trainer.phase, learner.updates, learner.env_steps) == (Phase.DONE, 40, 0)
    assert phases(tmp_path) == ["critic pretrain", "offline", "done"]
    assert learner.checkpoints.steps() == [0, 20, 40]
    caplog.clear()
    done = offline(demos, tmp_path)
    assert (done.trainer.phase, done.updates) == (Phase.DONE, 40)
    said = "resumed at step 40: training is complete (raise learner.offline_steps to go on, or do not set"
    assert said in caplog.text
    longer = offline(demos, tmp_path, offline_steps=60)
    assert (longer.trainer.phase, longer.updates, int(longer.state.critic_updates)) == (Phase.DONE, 60, 60)
    config = dataclasses.replace(
        experiment(**OFFLINE | {"offline_steps": 60, "online_steps": None, "max_steps": 20}), preset="qc", compat="qc"
    )
    online, _ = train_local(config, RunOptions([demos], str(tmp_path)))
    assert (online.trainer.phase, online.trainer.offline_updates, online.trainer.online_updates) == (Phase.DONE, 60, 20)
    assert int(online.state.critic_updates) == 60 + 20
    saved = read_config(tmp_path)
    assert (saved["preset"], saved["compat"]) == ("qc", "qc")  # what was applied is recorded
    caplog.clear()
    done = offline(demos, tmp_path, offline_steps=80)
    assert (done.trainer.phase, done.trainer.offline_updates) == (Phase.DONE, 60)
    said = "after online updates the offline phase is over; do not set learner.online_steps=0 to go on online"
    assert said in caplog.text
    assert "raise learner.offline_steps" not in caplog.text


def test_a_run_stopped_offline_goes_on_as_if_it_had_not_been(demos, tmp_path, whole):
    stop = threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        after_updates(patch, lambda trainer: trainer._learner.updates == 25 and stop.set())
        half = offline(demos, tmp_path, stop=stop)
    assert (half.trainer.phase, half.updates) == (Phase.OFFLINE, 25)
    assert half.checkpoints.steps() == [0, 20, 25]
    rest = offline(demos, tmp_path)
    assert (rest.trainer.phase, rest.updates, rest.trainer.offline_updates) == (Phase.DONE, 40, 40)
    assert_same_state(whole, rest)


class Killed(Exception):
    pass


def test_a_run_that_was_killed_offline_goes_on_from_its_newest_checkpoint(demos, tmp_path, whole):
    def killed(trainer: PhaseTrainer) -> None:
        if trainer._learner.updates == 25:
            trainer._learner.checkpoint = lambda **_: True  # a killed process writes nothing more
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        after_updates(patch, killed)
        with pytest.raises(Killed):
            offline(demos, tmp_path)
    rest = offline(demos, tmp_path)
    assert rest.checkpoints.steps() == [0, 20, 40]
    assert_same_state(whole, rest)
    steps = [r["step"] for r in by_kind(tmp_path)["train"]]
    assert steps == sorted(set(steps))  # what the lost life logged after its checkpoint does not count


def test_an_update_that_was_interrupted_does_not_end_the_offline_phase(demos, tmp_path):
    counted, calls = TrainingStats.updated, []

    def interrupted(self: TrainingStats, updates: int, metrics: dict) -> None:
        counted(self, updates, metrics)
        calls.append(updates)
        if sum(calls) == 25:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingStats, "updated", interrupted)
        with pytest.raises(KeyboardInterrupt):
            offline(demos, tmp_path)
    rest = offline(demos, tmp_path)
    assert (rest.trainer.phase, rest.updates, rest.trainer.offline_updates) == (Phase.DONE, 40, 40)


def write_shards(folder: Path, count: int) -> str:
    """OGBench files of two trajectories each, in the first of which the point arrives."""
    folder.mkdir()
    for shard in range(count):
        rng, n = np.random.default_rng(shard), 8
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


def test_shards_take_turns_and_a_resume_finds_the_right_one(demos, tmp_path, monkeypatch):
    demo_options = DemoOptions(dataset=write_shards(tmp_path / "shards", 3))
    seen: dict[int, tuple[str, ...]] = {}
    update = PhaseTrainer._update

    def watched(self: PhaseTrainer) -> None:
        episodes = self._learner.replay.episodes()
        seen[self._learner.updates] = tuple(sorted(e for s, e in episodes if s != "demonstrations"))
        assert sum(s == "demonstrations" for s, _ in episodes) == 12  # those of --demo_path stay
        update(self)

    def trained(name: str, steps: int) -> Learner:
        config = experiment(**OFFLINE | {"offline_steps": steps})
        config = dataclasses.replace(config, replay=dataclasses.replace(config.replay, dataset_replace_interval=10))
        return train_offline(config, RunOptions([demos], str(tmp_path / name), demo_options=demo_options))

    monkeypatch.setattr(PhaseTrainer, "_update", watched)
    at_once = trained("whole", 35)
    turns, first = [seen[step] for step in (0, 10, 20, 30)], dict(seen)
    assert all(seen[step] == turns[step // 10] for step in range(35))
    assert len(set(turns[:3])) == 3  # each once before one comes again
    trained("run", 25)
    seen.clear()
    rest = trained("run", 35)
    assert seen == {step: first[step] for step in range(25, 35)}
    assert_same_state(at_once, rest)


def test_owed_updates_without_their_steps_end_with_a_word(demos, tmp_path, caplog):
    config = experiment(**ONLINE, training_starts=20, online_steps=60)
    learner = learner_of(config, demos, tmp_path)
    feed(learner, journal_of(config, demos, 20))
    until(learner, Phase.TRAIN)
    feed(learner, [(100 + i, "other/s", record) for i, _, record in journal_of(config, demos, 60, "y")])
    learner.work()
    let_go(learner)
    caplog.clear()
    resumed = learner_of(config, demos, tmp_path)
    until(resumed, Phase.DONE, busy=True)
    assert "the online replay has no window to train on. Raise learner.online_steps to go on" in caplog.text
    let_go(resumed)


def test_a_warm_up_that_takes_all_online_steps_is_cut_short(demos, tmp_path, caplog):
    config = experiment(pretrain_steps=0, online_steps=50, training_starts=20, warmup_episodes=20)
    learner, _ = train_local(config, RunOptions([demos], str(tmp_path)))
    assert (learner.trainer.phase, learner.trainer.online_updates) == (Phase.DONE, 50 - 20)
    said = "the warm-up ends early: all 50 online steps came, in 5 of learner.warmup_episodes=20"
    assert said in caplog.text


@pytest.mark.parametrize("replay", [{}, {"demo_fraction": "uniform"}])
def test_an_offline_phase_that_is_prolonged_sees_no_online_step(demos, tmp_path, replay):
    def config(steps: int):
        made = experiment(pretrain_steps=0, offline_steps=steps, warmup_episodes=5, checkpoint_period=0)
        return dataclasses.replace(made, replay=dataclasses.replace(made.replay, **replay))

    journal = journal_of(config(10), demos, 30)
    first = learner_of(config(10), demos, tmp_path)
    until(first, Phase.WARMUP)
    feed(first, journal)
    let_go(first)
    learner = learner_of(config(20), demos, tmp_path)
    learner.refill(journal)
    assert learner.replay.ready.online > 0
    assert (learner.trainer.phase, learner.trainer.steps_allowed()) == (Phase.OFFLINE, 0)
    for episode in learner.replay._partitions.online.episodes.values():  # seen in a batch, it would spoil the networks
        learner.replay._partitions.storage.steps.state[episode.rows] = np.nan
    until(learner, Phase.WARMUP)
    assert learner.trainer.offline_updates == 20
    assert all(np.isfinite(leaf).all() for leaf in host_leaves(learner.state).values() if leaf.dtype.kind == "f")
    assert learner.trainer.steps_allowed() is None
    let_go(learner)

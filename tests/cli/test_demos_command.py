"""What a learner is given to learn from: how it is read, what is said of it, and where it could be had."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import types
import weakref
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from errors import naming

from serl_chunk.cli.learner import make_learner, train_offline
from serl_chunk.cli.local import train_local
from serl_chunk.cli.process import load
from serl_chunk.cli.record import run_record
from serl_chunk.data import rotating_dataset
from serl_chunk.data.demos import load_demos
from serl_chunk.data.formats import ogbench
from serl_chunk.data.rotating_dataset import ShardedSource
from serl_chunk.data.source import ReadOptions
from serl_chunk.learner import building
from serl_chunk.learner.building import RunOptions
from serl_chunk.learner.offline_data import DemoOptions, InitialData, open_dataset, read_demos
from serl_chunk.outcomes.robot import spec_of
from serl_chunk.runs.folder import open_run
from serl_chunk.runs.metrics import MetricsLog
from serl_chunk.types import ConfigError, DataError, Outcome

OGBENCH = load("ogbench", [])
FAKE = load("fake_aloha", [("learner.offline_steps", "1"), ("normaliser.actions", "absolute_range")])
SPEC = spec_of(FAKE)
TOLD = "--demo_path ~/.ogbench/data/cube-single-play-v0.npz"


def write(path: Path, *, labels: bool = True, value: float = 0.0) -> Path:
    """A trajectory of eight rows in the robot's dimensions, solved in the last two; without qpos."""
    arrays = {
        "observations": np.full((8, SPEC.state_dim), value, np.float32) + np.arange(8, dtype=np.float32)[:, None],
        "actions": np.zeros((8, SPEC.action_dim), np.float32),
        "terminals": np.arange(8) == 7,
    }
    if labels:
        arrays["rewards"] = np.where(np.arange(8) >= 6, 0.0, -1.0).astype(np.float32)
    np.savez(path, **arrays)
    return path


def test_a_relabelled_file_keeps_its_labels_unless_a_task_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "cube.npz")
    demo_options = DemoOptions().of_robot(OGBENCH.robot)
    demos = read_demos(OGBENCH, SPEC, [str(path)], demo_options)
    assert [(e.steps.n, e.end.outcome) for e in demos.episodes] == [(6, Outcome.SUCCESS), (1, Outcome.SUCCESS)]
    assert any("by the file's own labels (it has no qpos to judge cube-single" in line for line in caplog.messages)
    asked: list[str] = []

    def judge(where: str, task: str, *rest: object) -> None:
        asked.append(task)
        raise DataError("asked")

    monkeypatch.setattr(ogbench, "relabel_for_task", judge)
    by_flag = DemoOptions(ReadOptions(env="other-task")).of_robot(OGBENCH.robot)
    for options, file in ((by_flag.options, path), (demo_options.options, write(tmp_path / "bare.npz", labels=False))):
        with pytest.raises(DataError, match="asked"):
            load_demos([file], SPEC, cameras=(), options=options)
    assert asked == ["other-task", demo_options.options.env]


def test_where_data_can_be_had_is_said_where_there_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=naming(tmp_path / "absent.npz", TOLD)):
        read_demos(OGBENCH, SPEC, [str(tmp_path / "absent.npz")], DemoOptions())
    with pytest.raises(ConfigError, match=naming("--dataset_dir", tmp_path / "absent", TOLD)):
        open_dataset(OGBENCH, SPEC, DemoOptions(dataset=str(tmp_path / "absent")))
    wrong = DemoOptions(format="no_such")
    with pytest.raises(ConfigError, match=naming("demo_format", "no_such", "lerobot", "robomimic")) as error:
        read_demos(OGBENCH, SPEC, [str(write(tmp_path / "cube.npz"))], wrong)
    assert TOLD not in str(error.value)


def test_a_task_whose_rewards_nothing_can_be_given_is_refused(tmp_path: Path) -> None:
    """Else the user believes that the rewards are the task's, and they are the files' own."""
    run_record(FAKE, 1, str(tmp_path / "demos"), policy="scripted", noise=None, cameras=())
    asked = DemoOptions(ReadOptions(env="cube-single-play-singletask-task1-v0"))
    with pytest.raises(ConfigError, match=naming("--demo_env", "cube-single-play-singletask-task1-v0", "episodes")):
        read_demos(FAKE, SPEC, [str(tmp_path / "demos")], asked)
    with_shards = asked._replace(dataset=str(tmp_path))  # it may be meant for them
    assert len(read_demos(FAKE, SPEC, [str(tmp_path / "demos")], with_shards).episodes) == 1
    of_robot = DemoOptions().of_robot(OGBENCH.robot)  # not asked for
    assert len(read_demos(FAKE, SPEC, [str(tmp_path / "demos")], of_robot).episodes) == 1


def test_what_is_to_be_known_of_a_data_set_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "cube.npz")
    dataset = open_dataset(FAKE, SPEC, DemoOptions(dataset=str(tmp_path)))
    assert dataset is not None
    dataset.close()
    assert any(line.startswith("data set: successes by the file's own labels") for line in caplog.messages)


def test_the_texts_that_an_agent_learns_from_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_record(FAKE, 4, str(tmp_path), policy="scripted", noise=None, cameras=())
    files = sorted(map(str, tmp_path.glob("*.hdf5")))
    for path, text in zip(files, ("lift", "lift", "place", ""), strict=True):
        with h5py.File(path, "r+") as file:
            assert file["rl"].attrs["task"].decode() == FAKE.robot.task
            file["rl"].attrs["task"] = np.bytes_(text)
    for own, warned in (("place", False), ("fold", False), ("lower", True)):
        caplog.clear()
        overrides = [("agent.language.tokenizer", "bytes"), ("robot.task", own)]
        given = files if own != "lower" else files[:3]
        read_demos(load("fake_aloha", overrides), SPEC, given, DemoOptions())
        [line] = [line for line in caplog.messages if line.startswith("language: ")]
        assert "'lift' (2 episodes)" in line
        assert f"{own!r}" in line or warned
        assert any("is the text of no demonstration" in line for line in caplog.messages) == warned
    caplog.clear()
    read_demos(FAKE, SPEC, files, DemoOptions())
    assert not any("language" in line for line in caplog.messages)


class Taken:
    """In the learner's place: what it finds in the data set, and whether any other thread holds on to it."""

    def __init__(self, *args: Any, **rest: object) -> None:
        self.replay = types.SimpleNamespace(estimated_bytes=0)
        [dataset] = [a.dataset for a in args if isinstance(a, InitialData)]
        self.current = dataset.current
        self.shard = [weakref.ref(e.steps.observation["state"]) for e in dataset.take()]
        dataset.close()


@pytest.mark.parametrize("turn", [0, 5])
def test_only_the_learner_keeps_a_shard_and_a_run_that_goes_on_reads_the_one_it_had(
    turn: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shards").mkdir()
    for i in range(4):
        write(tmp_path / "shards" / f"cube-{i}.npz", value=100.0 * i)
    updates = turn * FAKE.replay.dataset_replace_interval
    shards = ShardedSource(tmp_path / "shards", ReadOptions(), replace_interval=1, seed=FAKE.seed)
    with contextlib.closing(shards) as walked:
        for _ in range(turn):
            walked.advance()
    read: list[Path] = []
    opened = rotating_dataset.OgbenchSource
    monkeypatch.setattr(rotating_dataset, "OgbenchSource", lambda path, said: read.append(path) or opened(path, said))
    monkeypatch.setattr(building, "Learner", Taken)
    monkeypatch.setattr(building.CheckpointStore, "newest", lambda self: updates if turn else None)
    run = open_run(FAKE, SPEC, str(tmp_path / "run"))
    with run.lock:
        learner = make_learner(
            FAKE, RunOptions([], demo_options=DemoOptions(dataset=str(tmp_path / "shards"))), run, SPEC,
            publish=lambda snapshot, info: None, threaded=False,
        )  # fmt: skip
    gc.collect()
    assert learner.shard
    assert not any(ref() is not None for ref in learner.shard)
    assert read[0] == learner.current == walked.current


@pytest.mark.parametrize("train", [train_local, train_offline], ids=["local", "offline"])
def test_a_refused_start_leaves_no_run_behind(tmp_path: Path, train: Any) -> None:
    """Nothing to pretrain on, a mistyped path, data that cannot be read; a folder with a run in it stays."""
    bad, absent = str(tmp_path / "bad.npz"), str(tmp_path / "absent")
    Path(bad).write_bytes(b"nothing")
    pretrained = dataclasses.replace(FAKE, learner=dataclasses.replace(FAKE.learner, pretrain_steps=1))
    for config, paths, dataset, said in ((pretrained, [], None, "demo_path"), (FAKE, [bad], None, "bad.npz"),
                                         (FAKE, [absent], None, absent), (FAKE, [], absent, absent)):  # fmt: skip
        with pytest.raises((ConfigError, DataError), match=naming(said)):
            train(config, RunOptions(paths, str(tmp_path / "run"), demo_options=DemoOptions(dataset=dataset)))
        assert not (tmp_path / "run").exists()
    old = open_run(FAKE, SPEC, str(tmp_path / "old"))
    with old.locked():
        old.write_config()
    with pytest.raises((ConfigError, DataError), match=naming("bad.npz")):
        train(FAKE, RunOptions([bad], str(tmp_path / "old")))
    assert (tmp_path / "old" / "config.json").exists()


def test_a_start_that_fails_leaves_the_notes_of_the_life_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Data that are there and cannot be read; what is said to have changed is what did since the last life."""
    run = tmp_path / "run"
    good, bad = write(tmp_path / "good.npz"), tmp_path / "bad.npz"
    bad.write_bytes(b"nothing")

    def made(*args: object, **rest: object) -> types.SimpleNamespace:
        [metrics] = [a for a in args if isinstance(a, MetricsLog)]
        return types.SimpleNamespace(replay=types.SimpleNamespace(estimated_bytes=0), metrics=metrics)

    monkeypatch.setattr(building, "Learner", made)

    def start(path: Path, seed: int) -> list[str]:
        caplog.clear()
        caplog.set_level("INFO")
        config = dataclasses.replace(FAKE, seed=seed)
        folder = open_run(config, SPEC, str(run))
        try:
            make_learner(
                config, RunOptions([str(path)]), folder, SPEC,
                publish=lambda s, i: None, threaded=False,
            ).metrics.close()  # fmt: skip
        finally:
            folder.lock.close()
        return [line for line in caplog.messages if "changed" in line]

    with pytest.raises((ConfigError, DataError)):
        start(bad, 1)
    assert not (run / "config.json").exists()  # as if it had never been
    assert start(good, 2) == []
    notes = [(run / name).read_bytes() for name in ("config.json", "demos.json")]
    with pytest.raises((ConfigError, DataError)):
        start(bad, 3)
    assert [(run / name).read_bytes() for name in ("config.json", "demos.json")] == notes
    assert start(good, 4) == ["config changed since the last start (the new value wins): seed: 2 -> 4"]


def test_what_is_wrong_with_data_names_the_learners_flags(tmp_path: Path):
    for name in ("good", "bad"):
        run_record(FAKE, 1, str(tmp_path / name), policy="scripted", noise=None, cameras=())
    with pytest.raises(DataError, match=naming("bad, good", "scores", "bad=REWARD,good=REWARD")):
        read_demos(FAKE, SPEC, [str(tmp_path)], DemoOptions())

"""What a learner is given to learn from: how it is read, what is said of it, and where it could be had."""

from __future__ import annotations

import dataclasses
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from errors import naming

from serl_chunk.actor import service
from serl_chunk.cli.learner import make_learner, train_offline
from serl_chunk.cli.local import train_local
from serl_chunk.cli.process import load
from serl_chunk.cli.record import run_record
from serl_chunk.data.demos import load_demos
from serl_chunk.data.formats import ogbench
from serl_chunk.data.source import ReadOptions
from serl_chunk.learner import building
from serl_chunk.learner.building import RunOptions
from serl_chunk.learner.offline_data import DemoOptions, open_dataset, read_demos
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


@pytest.mark.parametrize("train", [train_local, train_offline], ids=["local", "offline"])
def test_a_refused_start_leaves_no_run_and_no_open_robot_behind(
    tmp_path: Path, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing to pretrain on, a mistyped path, data that cannot be read; a folder with a run in it stays."""
    opened, closed, make = [], [], service.make_env

    def open_env(*args: Any, **more: Any) -> Any:
        opened.append(env := make(*args, **more))
        monkeypatch.setattr(env, "close", lambda: closed.append(env))
        return env

    monkeypatch.setattr(service, "make_env", open_env)
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
    assert (closed, bool(opened)) == (opened, train is train_local)


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

"""`serl-chunk data inspect`, `check` and `stats`: the screen, the line for machines, the files, the exit status."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from serl_chunk.cli.process import load
from serl_chunk.cli.record import run_record
from serl_chunk.data.formats.hdf5 import read_episode, write_episode
from serl_chunk.data.normalise.chunk_statistics import read_norm_stats
from serl_chunk.main import main
from serl_chunk.outcomes.robot import spec_of

CONFIG = load("fake_aloha", [])
SPEC = spec_of(CONFIG)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    cameras = tuple(c.name for c in SPEC.cameras)[:1]
    assert run_record(CONFIG, 3, str(folder), policy="scripted", noise=None, cameras=cameras) == 0
    return folder


@pytest.fixture
def folder(recorded, tmp_path) -> Path:
    return Path(shutil.copytree(recorded, tmp_path / "demos"))


def break_time(file: Path) -> None:
    episode = read_episode(file)
    stamp = episode.steps.stamp.copy()
    stamp[7] = stamp[6]
    write_episode(file, episode._replace(steps=dataclasses.replace(episode.steps, stamp=stamp)), SPEC)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:1000])


def test_broken_data_is_named_with_episode_and_tick_and_fails(folder, tmp_path, capsys):
    assert main(["data", "check", str(folder)]) == 0
    assert capsys.readouterr().out.startswith(f"{folder}: good: 0 faults, ")
    shutil.copy(folder / "episode_0.hdf5", folder / "episode_3.hdf5")  # a remark
    assert [main(["data", "check", str(folder), *strict]) for strict in ([], ["--strict"])] == [0, 1]
    capsys.readouterr()
    (folder / "episode_3.hdf5").unlink()
    break_time(folder / "episode_1.hdf5")
    truncate(folder / "episode_2.hdf5")
    assert main(["data", "inspect", str(folder)]) == 1
    out = capsys.readouterr().out
    assert "fault (time): episode_1.hdf5: the time stamp of tick 7" in out
    assert f"fault (unreadable): {folder / 'episode_2.hdf5'}: " in out
    assert "2, and 1 that cannot be read" in out
    assert out.splitlines()[-1].startswith("2 faults, ")
    assert main(["data", "check", str(folder), "--json", str(tmp_path / "f.json")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[:-1]] == ["time", "unreadable"]
    assert lines[-1].startswith(f"{folder}: BAD: 2 faults, ")
    content = json.loads((tmp_path / "f.json").read_text())
    fault = next(f for f in content["findings"] if f["severity"] == "fault")
    assert (fault["kind"], fault["episode"], fault["tick"]) == ("time", "episode_1.hdf5", 7)
    assert (content["ok"], len(content["episodes"]), len(content["action"])) == (False, 2, SPEC.action_dim)
    for file in folder.iterdir():
        truncate(file)
    assert main(["data", "inspect", str(folder)]) == 1
    assert "none could be read, of 3" in capsys.readouterr().out


def test_a_page_is_written(recorded, tmp_path, capsys):
    page = tmp_path / "page.html"
    flags = ["--max_episodes", "1", "--cameras", "none", "--plot", str(page)]
    assert main(["data", "inspect", str(recorded), *flags]) == 0
    assert str(page) in capsys.readouterr().out.splitlines()[-1]
    assert page.read_text().startswith("<!doctype html>")
    assert main(["data", "inspect", str(recorded), *flags]) == 2
    error = capsys.readouterr().err
    assert "--plot" in error
    assert "page.html exists" in error


def test_absolute_statistics_are_those_of_the_steps(recorded, tmp_path, capsys):
    assert main(["data", "stats", str(recorded), "--out", str(tmp_path / "s.json"), "--std_floor", "1e-6"]) == 0
    stats, _ = read_norm_stats(tmp_path / "s.json")
    steps = [read_episode(f).steps for f in recorded.iterdir()]
    for name, values in (
        ("state", np.concatenate([s.observation["state"] for s in steps])),
        ("actions", np.concatenate([s.action for s in steps])),
    ):
        values = values.astype(np.float64)
        np.testing.assert_allclose(stats[name].mean, values.mean(0), atol=1e-6)
        np.testing.assert_allclose(stats[name].std, values.std(0), rtol=1e-5)
        np.testing.assert_allclose(stats[name].q99, np.quantile(values, 0.99, axis=0), rtol=1e-9)
    out = capsys.readouterr().out
    assert f"all {sum(s.n for s in steps)} steps of 3 episodes; absolute actions, chunks of 1" in out
    assert out.count("state ") >= SPEC.state_dim
    assert out.splitlines()[-1] == f"wrote {tmp_path / 's.json'}"


def test_delta_statistics_take_the_mask_or_the_robot(recorded, tmp_path, capsys):
    by_mask = ["--mask=6,-1,6,-1", "--horizon", "10"]
    assert main(["data", "stats", str(recorded), "--actions", "delta", *by_mask, "--out", str(tmp_path / "a")]) == 0
    out = capsys.readouterr().out
    assert "delta actions, chunks of 10" in out
    assert sum(line.startswith("actions") and "delta" in line for line in out.splitlines()) == 12
    by_robot = ["--exp_name", "fake_aloha", "--horizon", "10"]
    assert main(["data", "stats", str(recorded), "--actions", "delta", *by_robot, "--out", str(tmp_path / "b")]) == 0
    a, b = (json.loads((tmp_path / x / "norm_stats.json").read_text()) for x in "ab")
    assert a["norm_stats"] == b["norm_stats"]
    assert a["serl_chunk"]["horizon"] == 10
    assert sum(a["serl_chunk"]["mask"]) == 12


def test_a_subset_is_said(recorded, tmp_path, capsys):
    flags = ["--max_samples", "20", "--seed", "5", "--out", str(tmp_path)]
    assert main(["data", "stats", str(recorded), *flags]) == 0
    assert "20 of " in capsys.readouterr().out
    first = (tmp_path / "norm_stats.json").read_text()
    assert main(["data", "stats", str(recorded), *flags]) == 0
    assert (tmp_path / "norm_stats.json").read_text() == first
    assert json.loads(first)["serl_chunk"]["samples"] == 20

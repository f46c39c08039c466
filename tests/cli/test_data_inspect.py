"""`serl-chunk data inspect`, `check` and `stats`: the screen, the line for machines, the files, the exit status."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from serl_chunk.cli.data.inspect import _drawn
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
    """A copy that a test may damage."""
    return Path(shutil.copytree(recorded, tmp_path / "demos"))


def break_time(file: Path) -> None:
    episode = read_episode(file)
    stamp = episode.steps.stamp.copy()
    stamp[7] = stamp[6]
    write_episode(file, episode._replace(steps=dataclasses.replace(episode.steps, stamp=stamp)), SPEC)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:1000])


def test_the_screen_says_what_is_there(recorded, capsys):
    assert main(["data", "inspect", str(recorded)]) == 0
    out = capsys.readouterr().out
    assert f"{recorded}: " in out
    facts = {line.split("  ")[0]: line for line in out.splitlines()}
    steps = sum(read_episode(f, cameras=()).steps.n for f in recorded.iterdir())
    for name, text in (
        ("episodes", "3, "), ("steps", f" {steps}; an episode "), ("state", f"{SPEC.state_dim} values"),
        ("rate", "50 Hz by the time stamps, 50 Hz declared"), ("action", f"{SPEC.action_dim} values"),
        ("outcomes", "3 success; 3 terminated, 0 truncated"), ("who acted", "scripted 100.0%"),
    ):  # fmt: skip
        assert text in facts[name]
    assert f"{SPEC.cameras[0].width}x{SPEC.cameras[0].height} pixels, a frame every step" in out
    assert "0 faults" in out.splitlines()[-1]
    assert all(line == line.rstrip() for line in out.splitlines())  # no terminal: nothing is padded or cut
    assert main(["data", "check", str(recorded)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{recorded}: good: 0 faults, ")


def test_lines_stay_whole_and_a_terminal_is_filled_but_not_exceeded(recorded, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["data", "inspect", str(recorded)]) == 0
    piped = capsys.readouterr().out
    assert any(len(line) > 60 for line in piped.splitlines())
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["data", "inspect", str(recorded)]) == 0
    assert ("\x1b[" in capsys.readouterr().out, "\x1b[" in piped) == (True, False)


def test_broken_data_is_named_with_episode_and_tick_and_fails(folder, tmp_path, capsys):
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


def test_remarks_of_a_kind_do_not_fill_the_screen_and_are_faults_where_that_is_wanted(folder, capsys):
    for i in range(3, 10):
        shutil.copy(folder / "episode_0.hdf5", folder / f"episode_{i}.hdf5")
    assert main(["data", "inspect", str(folder)]) == 0
    out = capsys.readouterr().out
    assert out.count("remark (duplicate episode)") == 5
    assert "... and 2 more of this kind (duplicate episode)" in out
    assert main(["data", "check", str(folder), "--strict"]) == 1
    assert "duplicate episode: episode_3.hdf5: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "text", "count"),
    [
        (["--horizon", "1000"], "steps, fewer than the 1000 of a chunk", 3),
        (["--exp_name", "fake_aloha"], "fewer than", 0),
        (["--max_episodes", "2"], "2 (the first of 3)", 1),
    ],
)
def test_flags_say_how_much_is_looked_at(recorded, capsys, flags, text, count):
    assert main(["data", "inspect", str(recorded), *flags]) == 0
    assert capsys.readouterr().out.count(text) == count


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


def test_first_shortest_longest_and_those_with_findings_are_drawn():
    episodes = [SimpleNamespace(key=f"e{n}", length=n) for n in (40, 41, 30, 60, 50, 50)]
    findings = SimpleNamespace(episodes=episodes, findings=[SimpleNamespace(episode="e50")] * 2)
    assert _drawn(findings) == [0, 2, 3, 4, 5]


def test_data_of_another_robot_is_a_fault_where_the_robot_is_known(folder, capsys):
    file = folder / "episode_0.hdf5"
    episode = read_episode(file, cameras=())
    spec = dataclasses.replace(SPEC, name="other", state_dim=2, joint_of_action=(0,) * SPEC.action_dim, cameras=())
    steps = dataclasses.replace(
        episode.steps, observation={"state": episode.steps.observation["state"][:, :2]}, sparse={}
    )
    final = {"state": np.zeros(2, np.float32)}
    write_episode(file, episode._replace(steps=steps, end=episode.end._replace(final_observation=final)), spec)
    assert main(["data", "check", str(folder), "--exp_name", "fake_aloha", "--cameras", "none"]) == 1
    assert "is this a demonstration of another robot?" in capsys.readouterr().out


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


def test_the_experiments_horizon_is_taken(recorded, capsys):
    assert main(["data", "stats", str(recorded), "--actions", "delta", "--exp_name", "fake_aloha"]) == 0
    assert f"chunks of {CONFIG.chunk.horizon}" in capsys.readouterr().out


def test_a_subset_is_said(recorded, tmp_path, capsys):
    flags = ["--max_samples", "20", "--seed", "5", "--out", str(tmp_path)]
    assert main(["data", "stats", str(recorded), *flags]) == 0
    assert "20 of " in capsys.readouterr().out
    first = (tmp_path / "norm_stats.json").read_text()
    assert main(["data", "stats", str(recorded), *flags]) == 0
    assert (tmp_path / "norm_stats.json").read_text() == first
    assert json.loads(first)["serl_chunk"]["samples"] == 20


def test_floored_dimensions_are_named(recorded, capsys):
    assert main(["data", "stats", str(recorded), "--std_floor", "0.1"]) == 0
    out = capsys.readouterr().out
    assert "state: std raised to 0.1 in dimension 0 (0.0" in out
    (row,) = [line for line in out.splitlines() if line.startswith("state 0 ")]
    assert row.split()[3] == "0.1"
    assert "floored" in row.split()[8:]

"""`serl-chunk data inspect` and `check`: the screen, the line for machines, the exit status."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from serl_chunk.cli.process import load, spec_of
from serl_chunk.cli.record import run_record
from serl_chunk.data.formats.hdf5 import read_episode, write_episode
from serl_chunk.main import main

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
    assert "3, " in facts["episodes"]
    steps = sum(read_episode(f, cameras=()).steps.n for f in recorded.iterdir())
    assert f" {steps}; an episode " in facts["steps"]
    assert "50 Hz by the time stamps, 50 Hz declared" in facts["rate"]
    assert f"{SPEC.state_dim} values" in facts["state"]
    assert f"{SPEC.action_dim} values" in facts["action"]
    assert f"{SPEC.cameras[0].width}x{SPEC.cameras[0].height} pixels, a frame every step" in out
    assert "3 success; 3 terminated, 0 truncated" in facts["outcomes"]
    assert "scripted 100.0%" in facts["who acted"]
    assert "0 faults" in out.splitlines()[-1]
    assert all(line == line.rstrip() for line in out.splitlines())  # no terminal: nothing is padded or cut


def test_lines_stay_whole_and_a_terminal_is_filled_but_not_exceeded(recorded, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["data", "inspect", str(recorded)]) == 0
    piped = capsys.readouterr().out
    assert any(len(line) > 60 for line in piped.splitlines())
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["data", "inspect", str(recorded)]) == 0
    shown = capsys.readouterr().out
    assert "\x1b[" in shown
    assert "\x1b[" not in piped


def test_broken_data_is_named_with_episode_and_tick_and_fails(folder, capsys):
    break_time(folder / "episode_1.hdf5")
    truncate(folder / "episode_2.hdf5")
    assert main(["data", "inspect", str(folder)]) == 1
    out = capsys.readouterr().out
    assert "fault (time): episode_1.hdf5: the time stamp of tick 7" in out
    assert f"fault (unreadable): {folder / 'episode_2.hdf5'}: " in out
    assert "2, and 1 that cannot be read" in out
    assert out.splitlines()[-1].startswith("2 faults, ")


def test_many_findings_of_a_kind_do_not_fill_the_screen(folder, capsys):
    for i in range(3, 10):
        shutil.copy(folder / "episode_0.hdf5", folder / f"episode_{i}.hdf5")
    assert main(["data", "inspect", str(folder)]) == 0
    out = capsys.readouterr().out
    assert out.count("remark (duplicate episode)") == 5
    assert "... and 2 more of this kind (duplicate episode)" in out


def test_check_says_one_line_of_good_data(recorded, capsys):
    assert main(["data", "check", str(recorded)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{recorded}: good: 0 faults, ")


def test_check_says_one_line_for_each_fault(folder, capsys):
    break_time(folder / "episode_1.hdf5")
    truncate(folder / "episode_2.hdf5")
    assert main(["data", "check", str(folder)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[:-1]] == ["time", "unreadable"]
    assert lines[-1].startswith(f"{folder}: BAD: 2 faults, ")


def test_strict_makes_remarks_faults(folder, capsys):
    shutil.copy(folder / "episode_0.hdf5", folder / "episode_3.hdf5")
    assert main(["data", "check", str(folder)]) == 0
    capsys.readouterr()
    assert main(["data", "check", str(folder), "--strict"]) == 1
    assert "duplicate episode: episode_3.hdf5: " in capsys.readouterr().out


def test_a_folder_of_nothing_but_broken_files_is_described(folder, capsys):
    for file in folder.iterdir():
        truncate(file)
    assert main(["data", "inspect", str(folder)]) == 1
    assert "none could be read, of 3" in capsys.readouterr().out


def test_the_experiments_horizon_and_the_flag_name_short_episodes(recorded, capsys):
    assert main(["data", "inspect", str(recorded), "--horizon", "1000"]) == 0
    assert capsys.readouterr().out.count("steps, fewer than the 1000 of a chunk") == 3
    assert main(["data", "inspect", str(recorded), "--exp_name", "fake_aloha"]) == 0
    assert "fewer than" not in capsys.readouterr().out


def test_first_episodes_only(recorded, capsys):
    assert main(["data", "inspect", str(recorded), "--max_episodes", "2"]) == 0
    assert "2 (the first of 3)" in capsys.readouterr().out


def test_json_holds_everything(folder, tmp_path, capsys):
    break_time(folder / "episode_1.hdf5")
    assert main(["data", "check", str(folder), "--json", str(tmp_path / "f.json")]) == 1
    content = json.loads((tmp_path / "f.json").read_text())
    assert content["ok"] is False
    (fault,) = [f for f in content["findings"] if f["severity"] == "fault"]
    assert (fault["kind"], fault["episode"], fault["tick"]) == ("time", "episode_1.hdf5", 7)
    assert len(content["episodes"]) == 3
    assert len(content["action"]) == SPEC.action_dim


def test_a_page_is_written(recorded, tmp_path, capsys):
    flags = ["--max_episodes", "1", "--cameras", "none", "--plot", str(tmp_path / "page")]
    assert main(["data", "inspect", str(recorded), *flags]) == 0
    page = tmp_path / "page" / "inspection.html"
    assert str(page) in capsys.readouterr().out.splitlines()[-1]
    assert page.read_text().startswith("<!doctype html>")


def test_the_page_may_be_named_and_is_seeded(recorded, tmp_path, monkeypatch):
    seen = {}

    def write(path, source, findings, *, seed, progress):
        seen[path] = (len(findings.episodes), seed)
        path.touch()

    monkeypatch.setattr("serl_chunk.data.inspect.html.write_page", write)
    page = tmp_path / "a" / "b.html"
    assert main(["data", "inspect", str(recorded), "--plot", str(page), "--seed", "7"]) == 0
    assert seen == {page: (3, 7)}


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

"""`serl-chunk data convert`, as it is typed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
from errors import naming

from serl_chunk.data.formats.hdf5 import read_episode, write_episode
from serl_chunk.main import main
from serl_chunk.types import Begin, End, Episode, Outcome, Source, Step, StepBlock


def _episode(n: int, seed: int) -> Episode:
    rng = np.random.default_rng(seed)

    def step(t: int) -> Step:
        seen = {"state": rng.normal(size=3).astype(np.float32), "images/top": rng.integers(0, 256, (8, 8, 3), np.uint8)}
        return Step(t, seen, rng.normal(size=2).astype(np.float32), 0.0, Source.SCRIPTED, -1, -1, t / 25)

    end = End(f"e{seed}", n, {"state": np.zeros(3, np.float32)}, True, False, Outcome.SUCCESS)
    return Episode(Begin(f"e{seed}", "stack"), StepBlock.from_steps(f"e{seed}", [step(t) for t in range(n)]), end)


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "in"
    path.mkdir()
    for i in range(5):
        write_episode(path / f"episode_{i}.hdf5", _episode(4 + i, i), None, hz=25.0)
    return path


def _run(*arguments: object) -> int:
    return main(["data", "convert", *map(str, arguments), "--workers", "0"])


def _files(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir() if p.suffix == ".hdf5")


def test_only_what_was_asked_for(folder, tmp_path):
    out = tmp_path / "out"
    assert _run(folder, "--to=hdf5", "--out", out, "--episodes=0,2-4", "--cameras=none", "--max_samples=11") == 0
    assert _files(out) == ["episode_0.hdf5", "episode_1.hdf5", "episode_2.hdf5"]
    third = read_episode(out / "episode_2.hdf5")
    assert third.begin.episode_id == "e3"
    assert not third.steps.sparse
    assert _run(folder, "--to=hdf5", "--out", tmp_path / "small", "--compress") == 0
    with h5py.File(tmp_path / "small" / "episode_0.hdf5") as file:
        assert file["/observations/images/top"].compression == "gzip"


def test_bad_episodes_end_it_or_are_listed(folder, tmp_path, capsys):
    for i in (1, 3):
        (folder / f"episode_{i}.hdf5").write_text("damaged")
    out = tmp_path / "out"
    assert _run(folder, "--to", "hdf5", "--out", out) == 1
    assert re.search(naming("episode_1.hdf5", "HDF5", "--skip-bad"), capsys.readouterr().err)
    assert _run(folder, "--to", "hdf5", "--out", out, "--resume", "--skip-bad") == 0
    said = capsys.readouterr().out
    assert "3 episodes, 18 steps, 18 frames (1 episodes were there before)" in said
    assert "2 bad episodes left out:" in said
    assert f"  3: {folder}/episode_3.hdf5: the file is truncated" in said


def test_foreign_files_and_notes(tmp_path, capsys):
    for score in (1, 5):
        path = tmp_path / "in" / f"score_{score}" / "episode_0.hdf5"
        path.parent.mkdir(parents=True)
        with h5py.File(path, "w") as file:
            file["/observations/qpos"], file["/observations/qvel"] = np.zeros((4, 2)), np.zeros((4, 2))
            file["/action"], file["/observations/images/top"] = np.ones((4, 2)), np.zeros((4, 8, 8, 3), np.uint8)
    arguments = (tmp_path / "in", "--to=hdf5", "--out", tmp_path / "out", "--task=fold the box")
    assert _run(*arguments) == 1
    assert "color" in capsys.readouterr().err
    arguments += ("--color=bgr", "--scores=score_5=1,score_1=0.25")
    assert _run(*arguments, "--hz=30") == 0  # nothing had been converted: no --resume
    assert "note: observations/qvel is not read" in capsys.readouterr().out
    assert _run(*arguments, "--resume") == 2
    assert re.search(naming(tmp_path / "out", "hz", 30.0, "None"), capsys.readouterr().err)
    first = read_episode(tmp_path / "out" / "episode_0.hdf5")
    assert first.begin.task == "fold the box"
    assert first.steps.reward.tolist() == [0, 0, 0.25]
    np.testing.assert_allclose(np.diff(first.steps.stamp), 1 / 30)


@pytest.mark.system
def test_ctrl_c_keeps_what_was_done_and_says_how_to_go_on(tmp_path):
    path, out = tmp_path / "in", tmp_path / "out"
    path.mkdir()
    for i in range(120):
        write_episode(path / f"episode_{i}.hdf5", _episode(60, i), None, hz=25.0)
    command = [sys.executable, "-m", "serl_chunk.main", "data", "convert", str(path), "--from=episodes", "--to=hdf5",
               f"--out={out}", "--workers=1"]  # fmt: skip
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    until = time.monotonic() + 30
    while process.poll() is None and len(list(out.glob("*.hdf5"))) < 3 and time.monotonic() < until:
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers too
    _, error = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "interrupted; the same command with --resume continues" in error
    assert "Traceback" not in error
    assert 3 <= len(list(out.glob("*.hdf5"))) < 120
    done = subprocess.run([*command, "--resume"], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(list(out.glob("*.hdf5"))) == 120
    lines = [json.loads(line) for line in (out / "conversion.jsonl").read_text().splitlines()]
    assert [e["number"] for e in lines if e["kind"] == "placed"] == list(range(120))


def test_a_full_disk_while_the_data_set_is_described_is_a_sentence(folder, tmp_path, monkeypatch, capsys):
    from serl_chunk.data.formats.hdf5_writer import Hdf5Sink

    def full(self, layout, staged):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr(Hdf5Sink, "finish", full)
        assert _run(folder, "--to", "hdf5", "--out", tmp_path / "out") == 1
    assert re.search(naming(tmp_path / "out", "No space left on device", "--resume"), capsys.readouterr().err)
    assert _run(folder, "--to", "hdf5", "--out", tmp_path / "out", "--resume") == 0

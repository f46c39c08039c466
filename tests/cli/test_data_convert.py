"""`serl-chunk data convert`, as it is typed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import h5py
import numpy as np
import pytest
from errors import naming

from serl_chunk.cli.data import convert
from serl_chunk.cli.data.options import shown_progress
from serl_chunk.data.convert.convert import Progress, Report
from serl_chunk.data.formats.hdf5 import read_episode, write_episode
from serl_chunk.main import main
from serl_chunk.types import STEP_COLUMNS, Begin, CameraSpec, End, Episode, Outcome, RobotSpec, Source, Step, StepBlock


def _episode(n: int, seed: int) -> Episode:
    rng = np.random.default_rng(seed)

    def step(t: int) -> Step:
        seen = {"state": rng.normal(size=3).astype(np.float32), "images/top": rng.integers(0, 256, (8, 8, 3), np.uint8)}
        return Step(t, seen, rng.normal(size=2).astype(np.float32), 0.0, Source.SCRIPTED, -1, -1, t / 25)

    end = End(f"e{seed}", n, {"state": np.zeros(3, np.float32)}, True, False, Outcome.SUCCESS)
    return Episode(Begin(f"e{seed}", "stack"), StepBlock.from_steps(f"e{seed}", [step(t) for t in range(n)]), end)


@pytest.fixture
def folder(tmp_path):
    """Five episodes of 4 to 8 steps at 25 Hz."""
    path = tmp_path / "in"
    path.mkdir()
    for i in range(5):
        write_episode(path / f"episode_{i}.hdf5", _episode(4 + i, i), None, hz=25.0)
    return path


def _run(*arguments: object) -> int:
    return main(["data", "convert", *map(str, arguments), "--workers", "0"])


def _files(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir() if p.suffix == ".hdf5")


def test_a_folder_becomes_a_folder(folder, tmp_path, capsys):
    out = tmp_path / "out"
    assert _run(folder, "--to", "hdf5", "--out", out) == 0
    assert f"{out}: 5 episodes, 30 steps, 30 frames; " in capsys.readouterr().out
    assert _files(out) == [f"episode_{i}.hdf5" for i in range(5)]
    with h5py.File(out / "episode_0.hdf5") as file:
        assert file.attrs["hz"] == 25
        assert file["/observations/images/top"].compression is None
    assert _run(folder, "--to", "hdf5", "--out", out, "--resume") == 0
    assert "(5 episodes were there before)" in capsys.readouterr().out


def test_the_joints_among_the_state_stay_the_joints(tmp_path, capsys):
    """Without --exp_name: the files say it themselves, by which state values `qpos` repeats."""
    robot = RobotSpec("arm", 25.0, 3, (-9.0, -9.0), (9.0, 9.0), (2, 0), (), (CameraSpec("top", 8, 8),), 50)
    (tmp_path / "in").mkdir()
    for i in range(2):
        write_episode(tmp_path / "in" / f"episode_{i}.hdf5", _episode(6, i), robot)
    assert _run(tmp_path / "in", "--to", "hdf5", "--out", tmp_path / "out") == 0
    assert "the robot is not known" not in capsys.readouterr().out
    for i in range(2):
        before, after = (h5py.File(tmp_path / folder / f"episode_{i}.hdf5") for folder in ("in", "out"))
        for name in ("/observations/qpos", "/rl/state", "/action"):
            assert before[name][()].tobytes() == after[name][()].tobytes()


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


@pytest.mark.parametrize("flag", ["--skip-bad", "--skip_problematic"])
def test_bad_episodes_end_it_or_are_listed(folder, tmp_path, capsys, flag):
    for i in (1, 3):
        (folder / f"episode_{i}.hdf5").write_text("damaged")
    out = tmp_path / "out"
    assert _run(folder, "--to", "hdf5", "--out", out) == 1
    assert re.search(naming("episode_1.hdf5", "HDF5", "--skip-bad"), capsys.readouterr().err)
    assert _run(folder, "--to", "hdf5", "--out", out, "--resume", flag) == 0
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


def test_an_upload_needs_its_library_and_is_tagged_with_the_version_of_the_format(
    folder, tmp_path, capsys, monkeypatch
):
    calls: list[tuple[str, tuple, dict]] = []

    class Api:
        def __getattr__(self, name: str):
            return lambda *args, **kwargs: calls.append((name, args, kwargs))

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(HfApi=Api, __spec__="there"))
    convert._push(tmp_path, "me/boxes", "lerobot-v2.1")
    assert [name for name, _, _ in calls] == ["create_repo", "upload_folder", "create_tag"]
    assert all(args in ((), ("me/boxes",)) and kwargs["repo_type"] == "dataset" for _, args, kwargs in calls)
    assert calls[1][2]["folder_path"] == str(tmp_path)
    assert "conversion.jsonl" in calls[1][2]["ignore_patterns"]
    assert calls[2][2]["tag"] == "v2.1"
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.setattr(convert.importlib.util, "find_spec", lambda name: None)
    arguments = ("--to=lerobot", "--push_to_hub", "--repo_id=me/boxes", "--out", tmp_path / "out")
    assert _run(folder, *arguments) == 2
    assert re.search(naming("--push_to_hub", "pip install huggingface_hub"), capsys.readouterr().err)


def test_without_a_terminal_a_line_is_printed_every_few_seconds_and_a_terminal_gets_a_bar(capsys, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(convert.time, "monotonic", lambda: clock[0])
    with shown_progress("converting", sys.stdout) as show:
        display = convert._display(show)
        display(Progress(2, 10, 0, 0, 0, 0.0))  # two were there before
        for done in range(3, 7):
            clock[0] += 2.0
            display(Progress(done, 10, 1, (done - 2) * 100, (done - 2) * 10**7, clock[0] - 100))
    assert capsys.readouterr().out.splitlines() == ["5 of 10 episodes, 50 frames/s, 5 MB/s decoded, 1 bad, 10 s left"]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    shown = []
    convert._display(lambda *a: shown.append(a))(Progress(1, 2, 0, 50, 10**6, 0.5))
    assert shown == [(1, 2, "100 frames/s, 2 MB/s decoded")]


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


@pytest.mark.parametrize(
    ("flags", "built"),
    [
        (["--to=lerobot"], {"version": "v3.0", "mode": "image", "image_codec": "png", "tolerance_s": None}),
        (["--to=lerobot-v2.1", "--image_codec=jpeg"], {"version": "v2.1", "image_codec": "jpeg"}),
        (["--to=lerobot", "--mode=video", "--tolerance_s=inf"], {"mode": "video", "tolerance_s": None}),
        (["--to=lerobot", "--tolerance_s=0.5", "--task=stack"], {"tolerance_s": 0.5, "task": "stack"}),
    ],
)
def test_flags_reach_the_lerobot_sink(folder, tmp_path, monkeypatch, flags, built):
    sinks = []

    def keep(source, keys, sink, path, **how):
        json.dumps(how["settings"], allow_nan=False)
        assert how["tolerance_s"] is None  # the sink looks at it
        sinks.append(sink)
        return Report(5, 30, 30, 1, 0, (), 0.1)

    monkeypatch.setattr(convert, "convert", keep)
    assert _run(folder, *flags, "--out", tmp_path / "out") == 0
    assert sinks[0].folder == tmp_path / "out"
    assert {name: getattr(sinks[0], name) for name in built} == built


def test_a_lerobot_data_set_without_a_rate_names_the_flag(folder, tmp_path, capsys):
    pytest.importorskip("pyarrow")
    for file in folder.iterdir():
        with h5py.File(file, "r+") as opened:
            del opened.attrs["hz"]
    arguments = (folder, "--to=lerobot", "--out", tmp_path / "out")
    assert _run(*arguments) == 1
    assert re.search(naming("LeRobot", "hz"), capsys.readouterr().err)


@pytest.mark.parametrize("mode", ["image", "video"])
def test_hdf5_to_lerobot_and_back(folder, tmp_path, mode):
    """States, actions and everything a step records come back as bytes; images as pixels, or nearly."""
    pytest.importorskip("pyarrow")
    pytest.importorskip("av")
    for i in range(5):  # noise is no picture for a video
        episode = _episode(4 + i, i)
        y, x = np.mgrid[0:48, 0:64]
        for rows in episode.steps.sparse.values():
            smooth = [
                np.stack([x * 3 + 5 * t, y * 4, (x + y) * 2], -1).astype(np.uint8) for t in range(len(rows.index))
            ]
            episode.steps.sparse["images/top"] = rows._replace(values=np.stack(smooth))
        write_episode(folder / f"episode_{i}.hdf5", episode, None, hz=25.0)
    there, back = tmp_path / "lerobot", tmp_path / "back"
    assert _run(folder, "--to", "lerobot", "--mode", mode, "--out", there) == 0
    assert _run(there, "--to", "hdf5", "--out", back) == 0
    for name in _files(folder):
        a, b = read_episode(folder / name), read_episode(back / name)
        assert (a.begin, a.end._replace(final_observation=None)) == (b.begin, b.end._replace(final_observation=None))
        for column in ("action", *STEP_COLUMNS):
            assert getattr(a.steps, column).tobytes() == getattr(b.steps, column).tobytes()
        assert a.steps.observation["state"].tobytes() == b.steps.observation["state"].tobytes()
        np.testing.assert_array_equal(a.end.final_observation["state"], b.end.final_observation["state"])
        before, after = a.steps.sparse["images/top"], b.steps.sparse["images/top"]
        np.testing.assert_array_equal(before.index, after.index)
        error = np.mean((before.values.astype(float) - after.values) ** 2)
        assert error == 0 if mode == "image" else 10 * np.log10(255**2 / max(error, 1e-9)) > 28


def test_a_full_disk_while_the_data_set_is_described_is_a_sentence(folder, tmp_path, monkeypatch, capsys):
    from serl_chunk.data.formats.hdf5_writer import Hdf5Sink

    def full(self, layout, staged):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr(Hdf5Sink, "finish", full)
        assert _run(folder, "--to", "hdf5", "--out", tmp_path / "out") == 1
    assert re.search(naming(tmp_path / "out", "No space left on device", "--resume"), capsys.readouterr().err)
    assert _run(folder, "--to", "hdf5", "--out", tmp_path / "out", "--resume") == 0


def test_a_reader_of_only_the_first_line_sees_no_traceback(folder):
    command = [sys.executable, "-m", "serl_chunk", "data", "inspect", str(folder)]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    process.stdout.close()
    assert b"Traceback" not in process.stderr.read()
    process.wait(60)
    process.stderr.close()

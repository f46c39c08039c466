"""A run's episodes as a data set: out of the journal and back into a replay, while the learner may be at work."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np
import pytest
from coded_episodes import SPEC, make
from coded_replay import coded
from errors import naming
from journal_runs import Run, assert_equal

from serl_chunk.attention.alarm import Alarm
from serl_chunk.cli.data import convert
from serl_chunk.cli.process import load
from serl_chunk.cli.record import run_record
from serl_chunk.data.demos import load_demos
from serl_chunk.data.formats.hdf5 import read_episode, write_episode
from serl_chunk.data.source import ReadOptions, decode_images
from serl_chunk.main import main
from serl_chunk.outcomes.robot import spec_of
from serl_chunk.runs.episodes import DEMOS, FORMAT, JOURNAL, RunDemos, RunSource, note_of
from serl_chunk.runs.folder import write_json
from serl_chunk.types import DataError, Outcome, Source, SparseRows


@pytest.fixture
def run(tmp_path) -> Run:
    """Four episodes: a success, one with human ticks that failed, one of a dead actor, a success with human ticks."""
    run = Run(tmp_path / "run")
    episodes = [coded(0, 12, "success"), coded(1, 10, "failure"), coded(2, 8, "died"), coded(3, 9, "success")]
    for k in (1, 3):
        episodes[k].source[2:5] = Source.HUMAN
    with run.opened():
        run.feed(episodes)
    run.episodes = episodes
    return run


def export(run, *flags) -> int:
    return main(["data", "export", str(run.path), "--format", "hdf5", "--workers", "0", *map(str, flags)])


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.hdf5"))


def interrupt(out: Path) -> dict[str, bytes]:
    """Leave a folder as if its export had been killed after two episodes; returns all files that it had."""
    before = {f.name: f.read_bytes() for f in files(out)}
    lines = (out / "conversion.jsonl").read_text().splitlines(keepends=True)
    placed = [i for i, line in enumerate(lines) if json.loads(line)["kind"] == "placed"]
    (out / "conversion.jsonl").write_text("".join(lines[: placed[2]]))
    for f in files(out)[2:]:
        f.unlink()
    return before


def test_a_run_that_goes_on_is_exported_as_it_was_when_the_export_began(run, tmp_path, capsys):
    out = tmp_path / "out"
    with run.opened():
        run.put("s", coded(8, 5).episode().begin)
        assert export(run, "--out", out) == 0  # beside the learner, which holds the lock
        assert "1 episodes were not over yet" in capsys.readouterr().out
        for file, e in zip(files(out), run.episodes, strict=True):
            assert_equal(read_episode(file, SPEC), e.episode())
        run.put("s", coded(8, 5).episode().steps)
        run.put("s", coded(8, 5).episode().end)
        before = interrupt(out)
        assert export(run, "--out", out, "--resume") == 0
    assert {f.name: f.read_bytes() for f in files(out)} == before
    assert len(before) == 4
    assert "1 episodes ended after this export began" in capsys.readouterr().out
    assert export(run, "--out", tmp_path / "new") == 0
    assert len(files(tmp_path / "new")) == 5
    interrupt(out)
    sorted((run.path / JOURNAL).glob("*.journal"))[0].unlink()  # the run has dropped it since
    assert 0 < len(RunSource(run.path).keys()) < 5
    assert export(run, "--out", out, "--resume", "--skip-bad") == 0
    assert [before[f.name] == f.read_bytes() for f in files(out)[:2]] == [True, True]
    assert 2 <= len(files(out)) <= 4


@pytest.fixture
def demos(tmp_path) -> Path:
    folder = tmp_path / "demos"
    folder.mkdir()
    for k in range(3):
        e = coded(k, 8 + k, "success").episode()
        steps = dataclasses.replace(e.steps, reward=np.zeros(8 + k, np.float32))
        write_episode(folder / f"episode_{k}.hdf5", e._replace(steps=steps), SPEC)
    return folder


def with_demos(run, paths, **options):
    loaded = load_demos(paths, SPEC, cameras=(), more=(FORMAT,), **options)
    write_json(run.path / DEMOS, note_of(loaded, options.get("options")))
    return loaded


def test_the_demonstrations_a_run_was_started_with_are_exported_and_those_that_changed_or_went_are_named(
    run, demos, tmp_path
):
    with_demos(run, [demos])
    assert export(run, "--out", tmp_path / "out", "--store", "demo") == 0
    for ours, theirs in zip(files(tmp_path / "out"), files(demos), strict=True):
        assert_equal(read_episode(ours, SPEC), read_episode(theirs, SPEC))
    some = ["--store", "demo", "--cameras", "none", "--only", "success"]
    assert export(run, "--out", tmp_path / "some", *some) == 0
    assert len(files(tmp_path / "some")) == 3
    source = RunDemos(run.path)
    first, second, _ = files(demos)
    first.unlink()
    write_episode(second, coded(9, 5, "success").episode(), SPEC)
    for key, name in zip(source.keys(), ("episode_0.hdf5", "episode_1.hdf5"), strict=False):
        with pytest.raises(DataError, match=naming(name, run.path)):
            source.read(key)
    RunDemos(run.path).read("000002")


def test_how_they_were_read_is_remembered(run, tmp_path):
    with h5py.File(tmp_path / "plain.hdf5", "w") as file:
        file["/observations/qpos"] = np.zeros((6, 2), np.float32)
        file["/action"] = np.arange(12, dtype=np.float32).reshape(6, 2)
    plain = dataclasses.replace(SPEC, state_dim=2, joint_of_action=(0, 1))
    other = Run(tmp_path / "other", plain)
    loaded = load_demos([tmp_path / "plain.hdf5"], plain, options=ReadOptions(success=True))
    write_json(other.path / DEMOS, note_of(loaded, ReadOptions(success=True)))
    assert RunDemos(other.path).read("000000").end.outcome is Outcome.SUCCESS
    (other.path / DEMOS).write_text('{"episodes": 3}')
    with pytest.raises(DataError, match=naming("demos.json", "KeyError('options')")):
        RunDemos(other.path)
    assert decode_images(load_demos([tmp_path / "plain.hdf5"], plain).episodes[0]).end.outcome is Outcome.UNKNOWN


def written(folder: Path, lengths: Sequence[int]) -> Path:
    folder.mkdir()
    for number, length in enumerate(lengths):
        write_episode(folder / f"episode_{number}.hdf5", coded(number, length, "success").episode(), SPEC)
    return folder


def _run(*arguments: object) -> int:
    return main(["data", "convert", *map(str, arguments), "--workers", "0"])


def test_bad_episodes_end_it_or_are_listed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(convert, "_EVERY", 0.0)
    folder, out = written(tmp_path / "in", range(4, 9)), tmp_path / "out"
    for i in (1, 3):
        (folder / f"episode_{i}.hdf5").write_text("damaged")
    assert _run(folder, "--to", "hdf5", "--out", out) == 1
    assert re.search(naming("episode_1.hdf5", "HDF5", "--skip-bad"), capsys.readouterr().err)
    assert _run(folder, "--to", "hdf5", "--out", out, "--resume", "--skip-bad") == 0
    said = capsys.readouterr().out
    assert "3 episodes, 18 steps, 36 frames (1 episodes were there before)" in said  # of two cameras
    assert re.search(r"of \d episodes, \d+ frames/s, .*, 2 bad", said)
    assert "2 bad episodes left out:" in said
    assert f"  3: {folder}/episode_3.hdf5: the file is truncated" in said
    assert main(["data", "repair", str(folder), "--out", str(tmp_path / "whole"), "--workers", "0"]) == 0
    assert f"  3: {folder}/episode_3.hdf5: the file is truncated" in capsys.readouterr().out
    assert [f.read_bytes() for f in files(tmp_path / "whole")] == [f.read_bytes() for f in files(out)]
    assert (folder / "episode_3.hdf5").read_text() == "damaged"


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
    said = capsys.readouterr().out
    assert "note: observations/qvel is not read" in said
    assert "all steps are taken for a human's" in said
    assert _run(*arguments, "--resume") == 2
    assert re.search(naming(tmp_path / "out", "hz", 30.0, "None"), capsys.readouterr().err)
    first = read_episode(tmp_path / "out" / "episode_0.hdf5")
    assert (first.begin.task, first.steps.reward.tolist()) == ("fold the box", [0, 0, 0.25])
    np.testing.assert_allclose(np.diff(first.steps.stamp), 1 / 30)


@pytest.mark.system
def test_ctrl_c_keeps_what_was_done_and_says_how_to_go_on(tmp_path):
    path, out = written(tmp_path / "in", [20] * 40), tmp_path / "out"
    flags = [str(path), "--from=episodes", "--to=hdf5", f"--out={out}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "serl_chunk.main", "data", "convert", *flags, "--workers=1"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    until = time.monotonic() + 30
    while process.poll() is None and len(list(out.glob("*.hdf5"))) < 3 and time.monotonic() < until:
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers too
    _, error = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "interrupted; the same command with --resume continues" in error
    assert "Traceback" not in error
    assert 3 <= len(list(out.glob("*.hdf5"))) < 40
    assert _run(*flags, "--resume") == 0
    assert len(list(out.glob("*.hdf5"))) == 40
    lines = [json.loads(line) for line in (out / "conversion.jsonl").read_text().splitlines()]
    assert [e["number"] for e in lines if e["kind"] == "placed"] == list(range(40))


CONFIG = load("fake_aloha", [])
FAKE_SPEC = spec_of(CONFIG)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    copied = tmp_path_factory.mktemp("recorded")
    cameras = tuple(c.name for c in FAKE_SPEC.cameras)[:1]
    assert run_record(CONFIG, 3, str(copied), policy="scripted", noise=None, cameras=cameras) == 0
    return copied


@pytest.fixture
def copied(recorded, tmp_path) -> Path:
    return Path(shutil.copytree(recorded, tmp_path / "demos"))


def break_time(file: Path) -> None:
    episode = read_episode(file)
    stamp = episode.steps.stamp.copy()
    stamp[7] = stamp[6]
    write_episode(file, episode._replace(steps=dataclasses.replace(episode.steps, stamp=stamp)), FAKE_SPEC)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:1000])


def test_broken_data_is_named_with_episode_and_tick_and_fails(copied, tmp_path, capsys):
    assert main(["data", "check", str(copied)]) == 0
    assert capsys.readouterr().out.startswith(f"{copied}: good: 0 faults, ")
    shutil.copy(copied / "episode_0.hdf5", copied / "episode_3.hdf5")  # a remark
    assert [main(["data", "check", str(copied), *strict]) for strict in ([], ["--strict"])] == [0, 1]
    capsys.readouterr()
    (copied / "episode_3.hdf5").unlink()
    break_time(copied / "episode_1.hdf5")
    truncate(copied / "episode_2.hdf5")
    assert main(["data", "inspect", str(copied)]) == 1
    out = capsys.readouterr().out
    assert "fault (time): episode_1.hdf5: the time stamp of tick 7" in out
    assert f"fault (unreadable): {copied / 'episode_2.hdf5'}: " in out
    assert "2, and 1 that cannot be read" in out
    assert out.splitlines()[-1].startswith("2 faults, ")
    assert main(["data", "check", str(copied), "--json", str(tmp_path / "f.json")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[:-1]] == ["time", "unreadable"]
    assert lines[-1].startswith(f"{copied}: BAD: 2 faults, ")
    content = json.loads((tmp_path / "f.json").read_text())
    fault = next(f for f in content["findings"] if f["severity"] == "fault")
    assert (fault["kind"], fault["episode"], fault["tick"]) == ("time", "episode_1.hdf5", 7)
    assert (content["ok"], len(content["episodes"]), len(content["action"])) == (False, 2, FAKE_SPEC.action_dim)
    for file in copied.iterdir():
        truncate(file)
    assert main(["data", "inspect", str(copied)]) == 1
    assert "none could be read, of 3" in capsys.readouterr().out


def test_a_subset_is_said(recorded, tmp_path, capsys):
    flags = ["--max_samples", "20", "--seed", "5", "--out", str(tmp_path)]
    assert main(["data", "stats", str(recorded), *flags]) == 0
    assert "20 of " in capsys.readouterr().out
    first = (tmp_path / "norm_stats.json").read_text()
    assert main(["data", "stats", str(recorded), *flags]) == 0
    assert (tmp_path / "norm_stats.json").read_text() == first
    assert json.loads(first)["serl_chunk"]["samples"] == 20


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


RISES, FALLS = (0.25, 0.5, 0.75), (0.25, 0.75, 0.125)


def run_folder(path, run_id: str, *ends: tuple[str, tuple[float, ...]]):
    """A run of episodes of 12 ticks: how each ends, and Q at the ticks 0, 4 and 8."""
    run = Run(path)
    config = path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"run_id": run_id}))
    with run.opened():
        for number, (end, q) in enumerate(ends):
            coded = make(np.random.default_rng(number), number, human=False, end=end)
            coded.length, coded.source = 12, np.full(12, Source.POLICY, np.uint8)
            coded.reads[:] = [set(), set()]
            begin, steps, ended = coded.episode()
            if end == "died":
                ended = ended._replace(outcome_by="restart")
            if q:
                rows = SparseRows(np.array([0, 4, 8], np.int32), np.array(q, np.float32))
                steps.sparse["decision/q"] = rows
            for record in (begin, steps, ended):
                run.put("a", record)
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    first = [("success", RISES)] * 3 + [("failure", FALLS)] * 2 + [("success", ()), ("died", FALLS)]
    second = [("success", RISES), ("success", FALLS), ("failure", FALLS), ("limit", FALLS), ("failure", RISES)]
    return run_folder(folder / "first", "1", *first), run_folder(folder / "second", "2", *second)


@pytest.fixture
def fitted(runs, tmp_path, capsys):
    file = tmp_path / "attention.json"
    words = ["attention", "fit", str(runs[0]), "--false_alarms", "0", "--out"]
    assert main([*words, str(tmp_path / "none" / "a.json")]) != 0
    assert re.match(naming(tmp_path / "none" / "a.json"), capsys.readouterr().err)
    assert main([*words, str(file)]) == 0
    assert "left out: 2 episodes" in capsys.readouterr().out
    assert Alarm.read(file).fall == 0
    return file


def test_test_prints_the_figures_of_another_run(runs, fitted, tmp_path, capsys):
    figures = tmp_path / "figures.json"
    assert main(["attention", "test", str(fitted), str(runs[1]), "--json", str(figures)]) == 0
    out = capsys.readouterr().out
    assert "recall 66.7%: an alarm in 2 of 3 failures" in out
    assert "precision 66.7%: 2 of 3 alarms true" in out
    assert "false alarms in 50.0% of 2 successes" in out
    after = (12 - 8) / SPEC.control_hz
    assert f"{after:.1f} s before the end" in out
    written = json.loads(figures.read_text())
    assert (written["all"], written["all"]["recall"]) == (written["runs"][str(runs[1])], pytest.approx(2 / 3))
    assert written["alarm"]["runs"] == [{"path": str(runs[0]), "run_id": "1"}]


def test_a_run_that_it_was_fitted_on_has_to_be_wanted(runs, fitted, capsys):
    words = ["attention", "test", str(fitted), str(runs[1]), str(runs[0])]
    assert main(words) == 2
    assert re.match(naming(runs[0], "--fitted"), capsys.readouterr().err)
    assert main([*words, "--fitted"]) == 0
    out = capsys.readouterr().out
    assert out.index(f"{runs[1]}:\n") < out.index(f"{runs[0]}:\n") < out.index("all runs:\n")


def test_several_paths_are_merged_with_every_content_once_and_no_path_is_changed(run, demos, tmp_path, capsys):
    for k, at in enumerate(("a", "b")):
        (tmp_path / at).mkdir()
        shutil.copy(demos / "episode_0.hdf5", tmp_path / at / f"x_{k}.hdf5")
    assert main(["data", "rename-task", str(tmp_path / "b"), "", "lift the cube"]) == 0
    before = {file: file.read_bytes() for file in tmp_path.rglob("*.hdf5")}
    paths = [str(path) for path in (tmp_path / "a", demos, tmp_path / "b", run.path)]
    out = tmp_path / "merged"  # next to what is read
    words = ["data", "merge", *paths, "--out", str(out), "--workers", "0"]
    assert main(words) == 0
    assert "2 copies left out" in capsys.readouterr().out
    merged = [read_episode(file, SPEC) for file in files(out)]
    assert len(merged) == 3 + 4
    assert merged[0].begin.task == "lift the cube"
    for ours, theirs in zip(merged[3:], run.episodes, strict=True):
        assert_equal(ours, theirs.episode())
    assert {file: file.read_bytes() for file in before} == before
    assert main(words) == 2  # nothing is overwritten


def test_a_task_is_renamed_in_the_files_that_have_it_alone(demos, capsys):
    assert main(["data", "rename-task", str(demos / "episode_1.hdf5"), "", "lift"]) == 0
    before = {file: read_episode(file, SPEC) for file in files(demos)}
    untouched = (demos / "episode_0.hdf5").read_bytes()
    assert main(["data", "rename-task", str(demos), "lift", "place"]) == 0
    assert "1 of 3 episodes" in capsys.readouterr().out
    after = {file: read_episode(file, SPEC) for file in files(demos)}
    assert [e.begin.task for e in after.values()] == ["", "place", ""]
    assert_equal(after[demos / "episode_1.hdf5"], before[demos / "episode_1.hdf5"]._replace(
        begin=before[demos / "episode_1.hdf5"].begin._replace(task="place")))  # fmt: skip
    assert (demos / "episode_0.hdf5").read_bytes() == untouched
    assert sorted(file.name for file in demos.iterdir()) == [f"episode_{k}.hdf5" for k in range(3)]

"""A run's episodes as a data set: out of the journal and back into a replay, while the learner may be at work."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import h5py
import numpy as np
import pytest
from coded_episodes import SPEC, config, preprocess
from coded_replay import RNG, coded
from errors import naming
from journal_runs import Run, assert_equal

from serl_chunk.data.demos import load_demos
from serl_chunk.data.formats.hdf5 import read_episode, write_episode
from serl_chunk.data.source import ReadOptions, decode_images
from serl_chunk.main import main
from serl_chunk.replay.replay import Replay
from serl_chunk.runs.episodes import DEMOS, FORMAT, JOURNAL, RunDemos, RunSource, note_of
from serl_chunk.runs.folder import write_json
from serl_chunk.types import DataError, Outcome, Source

pytestmark = pytest.mark.compiles


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


def test_journal_to_hdf5_to_replay_is_equal(run, tmp_path):
    assert export(run, "--out", tmp_path / "out") == 0
    read = [read_episode(f, SPEC) for f in files(tmp_path / "out")]
    for mine, e in zip(read, run.episodes, strict=True):
        assert_equal(mine, e.episode())
    cfg = config()
    replays = [Replay(SPEC, cfg, preprocess(cfg, ("a", "b"))) for _ in range(2)]
    replays[0].add_demo(*(e.episode() for e in run.episodes))
    exported = load_demos([tmp_path / "out"], SPEC, cameras=("a", "b"))
    assert len(exported.episodes) == 4
    replays[1].add_demo(*read)
    one, two = (r.sample(RNG(4), 50) for r in replays)
    for a, b in zip(one, two, strict=True):
        for key in a if isinstance(a, dict) else [None]:
            np.testing.assert_array_equal(a if key is None else a[key], b if key is None else b[key])


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


# -- the demonstrations of a run


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


def test_the_demonstrations_a_run_was_started_with_are_exported(run, demos, tmp_path):
    with_demos(run, [demos])
    assert export(run, "--out", tmp_path / "out", "--store", "demo") == 0
    for ours, theirs in zip(files(tmp_path / "out"), files(demos), strict=True):
        assert_equal(read_episode(ours, SPEC), read_episode(theirs, SPEC))
    some = ["--store", "demo", "--cameras", "none", "--only", "success"]
    assert export(run, "--out", tmp_path / "some", *some) == 0
    assert len(files(tmp_path / "some")) == 3


def test_demonstrations_that_changed_or_went_are_named(run, demos):
    with_demos(run, [demos])
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

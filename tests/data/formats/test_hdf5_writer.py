"""The sink that puts episodes into a folder."""

from __future__ import annotations

import os

import numpy as np
import pytest
from errors import naming

from serl_chunk.data.formats import hdf5_writer
from serl_chunk.data.formats.hdf5 import read_episode
from serl_chunk.data.formats.hdf5_writer import EpisodeWriter
from serl_chunk.types import Begin, ConfigError, DataError, End, Outcome, Source, Step


def _feed(writer: EpisodeWriter, records: tuple[Begin, list[Step], End], outcome: Outcome = Outcome.UNKNOWN) -> None:
    """Hand them over one by one, as a control loop does."""
    begin, steps, end = records
    writer.begin(begin)
    for step in steps:
        writer.step(step)
    writer.end(end._replace(outcome=outcome))


def test_records_become_files_and_nothing_is_overwritten(tmp_path, spec, make_records, make_episode, assert_same):
    (tmp_path / "episode_7.hdf5").write_text("mine")
    options = [{"n": 3 + k, "seed": k, "decision_ticks": (0, 2), "shared": (1,)} for k in range(3)]
    with EpisodeWriter(tmp_path, spec) as first, EpisodeWriter(tmp_path, spec) as second:
        for writer, each in zip((first, second, first), options, strict=True):
            _feed(writer, make_records(spec, **each))
            writer.flush()
    assert [[p.name for p in w.written] for w in (first, second)] == [
        ["episode_8.hdf5", "episode_10.hdf5"],
        ["episode_9.hdf5"],
    ]
    for k, each in enumerate(options):
        assert_same(read_episode(tmp_path / f"episode_{8 + k}.hdf5", spec), make_episode(spec, **each))
    assert (tmp_path / "episode_7.hdf5").read_text() == "mine"


def test_keep_chooses_and_a_failed_write_reaches_the_caller_once(tmp_path, spec, joints_spec, make_records):
    folder = tmp_path / "new" / "demos"
    writer = EpisodeWriter(folder, spec, keep=lambda e: e.end.outcome is Outcome.SUCCESS)
    _feed(writer, make_records(joints_spec, 3, seed=8), Outcome.SUCCESS)
    with pytest.raises(DataError, match=naming("episode_0.hdf5", "arm3", 3, "/action", 2)):
        writer.flush()
    for k, outcome in enumerate((Outcome.FAILURE, Outcome.SUCCESS, Outcome.UNKNOWN)):
        _feed(writer, make_records(spec, 3, seed=k), outcome)
    writer.close()
    writer.close()
    assert [read_episode(p).begin.episode_id for p in writer.written] == ["e1"]
    assert writer.written == list(folder.iterdir())


def test_an_episode_that_had_no_room_is_written_later_under_the_next_number(tmp_path, spec, make_records, monkeypatch):
    def full(*args, **options):
        raise DataError("the disk is full")

    with EpisodeWriter(tmp_path, spec) as writer:
        with monkeypatch.context() as disk:
            disk.setattr(hdf5_writer, "write_episode", full)
            _feed(writer, make_records(spec, 3, seed=8))
            for _ in range(2):
                with pytest.raises(DataError, match="full"):
                    writer.flush()
                writer.again()
            with pytest.raises(DataError, match="full"):
                writer.flush()
        writer.flush()
        assert os.listdir(tmp_path) == []
        writer.again()
        _feed(writer, make_records(spec, 3, seed=9))
        writer.flush()
    assert [read_episode(p).begin.episode_id for p in writer.written] == ["e8", "e9"]
    assert sorted(os.listdir(tmp_path)) == ["episode_0.hdf5", "episode_1.hdf5"]


def test_records_out_of_order_and_a_folder_that_cannot_be_made_are_refused(tmp_path, spec, make_records):
    step = Step(0, {"state": np.zeros(5, np.float32)}, np.zeros(3, np.float32), 0.0, Source.HUMAN, -1, -1, 0.0)
    end = End("a", 1, None, False, True, Outcome.UNKNOWN)
    with EpisodeWriter(tmp_path, spec) as writer:
        with pytest.raises(DataError, match=naming("step", 0)):
            writer.step(step)
        with pytest.raises(DataError, match=naming("a", "(none)")):
            writer.end(end)
        writer.begin(Begin("a"))
        with pytest.raises(DataError, match=naming("b", "a")):
            writer.begin(Begin("b"))
        writer.end(end._replace(length=0))  # no steps: nothing to keep
        writer.begin(Begin("a"))
        writer.step(step)
        writer.step(step._replace(tick=2))
        writer.end(end)
        with pytest.raises(DataError, match=naming("a", "ticks")):
            writer.flush()
    assert os.listdir(tmp_path) == []
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=naming("file", "is a file", "expected a folder")):
        EpisodeWriter(tmp_path / "file" / "demos", spec)

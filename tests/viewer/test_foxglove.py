"""An MCAP file, read back by mcap's own reader."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import sys

import numpy as np
import pytest
import viewed
from errors import naming
from PIL import Image
from viewed import LENGTH

from serl_chunk.types import ConfigError, DataError
from serl_chunk.viewer.foxglove import write_mcap


def test_a_reader_gets_what_was_recorded(tmp_path):
    reader = pytest.importorskip("mcap.reader")
    episode = viewed.episodes()[2]
    late = dataclasses.replace(episode.steps, stamp=episode.steps.stamp + 1e5)  # of a robot that has run for a day
    episode = episode._replace(steps=late)
    line = write_mcap(tmp_path / "e.mcap", episode, 50.0)
    assert str(tmp_path / "e.mcap") in line
    topics: dict[str, list] = {}
    with (tmp_path / "e.mcap").open("rb") as file:
        mcap = reader.make_reader(file)
        for schema, channel, message in mcap.iter_messages():
            assert (schema.encoding, channel.message_encoding) == ("jsonschema", "json")
            topics.setdefault(channel.topic, []).append((message.log_time, schema.name, json.loads(message.data)))
        (about,) = mcap.iter_metadata()
    assert about.metadata["episode"] == episode.begin.episode_id
    assert about.metadata["outcome"] == "unknown"
    assert sorted(topics) == ["/action", "/camera/a", "/camera/b", "/decision/q", "/reward", "/source", "/state"]
    state = np.array([m["values"] for _, _, m in topics["/state"]])
    np.testing.assert_array_equal(state, episode.steps.observation["state"])
    np.testing.assert_array_equal([m["values"] for _, _, m in topics["/action"]], episode.steps.action)
    assert [m["value"] for _, _, m in topics["/source"]] == ["human"] * 2 + ["hold"] + ["policy"] * 9
    assert [(m["tick"], m["value"]) for _, _, m in topics["/decision/q"]] == [(0, 1), (5, -1.5), (10, -2)]
    at, schema, image = topics["/camera/b"][1]
    assert schema == "foxglove.CompressedImage"
    assert (image["format"], image["frame_id"]) == ("jpeg", "b")
    assert image["timestamp"] == {"sec": at // 10**9, "nsec": at % 10**9}
    assert np.asarray(Image.open(io.BytesIO(base64.b64decode(image["data"])))).shape == (3, 2, 3)
    assert len(topics["/camera/b"]) == 4
    times = [at for at, _, _ in topics["/state"]]
    assert times == [round(1e9 * (s - episode.steps.stamp[0])) for s in episode.steps.stamp]
    assert times[6] - times[5] == pytest.approx(1e9 * 10 / 50)  # the gap of nine periods stays


def test_stamps_that_are_not_known_are_those_of_the_ticks(tmp_path):
    reader = pytest.importorskip("mcap.reader")
    begin, steps, end = viewed.episodes()[0]
    episode = viewed.Episode(begin, dataclasses.replace(steps, stamp=np.zeros(LENGTH)), end)
    with pytest.raises(DataError, match=naming("hz")):
        write_mcap(tmp_path / "e.mcap", episode, None)
    assert not (tmp_path / "e.mcap").exists()
    write_mcap(tmp_path / "e.mcap", episode, 10.0)
    with (tmp_path / "e.mcap").open("rb") as file:
        times = [m.log_time for _, _, m in reader.make_reader(file).iter_messages(topics=["/state"])]
    assert times == [10**8 * k for k in range(LENGTH)]


def test_a_file_that_exists_stays_and_without_the_package_the_extra_is_named(tmp_path, monkeypatch):
    (tmp_path / "e.mcap").write_text("mine")
    for name, named in (("e.mcap", tmp_path / "e.mcap"), ("new.mcap", "serl-chunk[viz]")):
        with pytest.raises(ConfigError, match=naming(named)) as error:
            write_mcap(tmp_path / name, viewed.episodes()[0], 50.0)
        assert error.value.parameter == "mcap"
        monkeypatch.setitem(sys.modules, "mcap", None)
        monkeypatch.setitem(sys.modules, "mcap.writer", None)
    assert (tmp_path / "e.mcap").read_text() == "mine"
    assert not (tmp_path / "new.mcap").exists()

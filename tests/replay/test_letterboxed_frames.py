"""A replay whose agent reads frames of another size: each is scaled once, on every way in."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from coded_episodes import SPEC, config, make, preprocess
from coded_replay import RNG, coded
from deferred_episodes import lazy

from serl_chunk.data.preprocess import letterbox
from serl_chunk.replay.memory import estimate_disk_bytes
from serl_chunk.replay.replay import Replay
from serl_chunk.transport.wire.jpeg import encode_jpeg, jpeg_images
from serl_chunk.types import CameraSpec, DataError, StepBlock

CAMERAS = (CameraSpec("a", 6, 5), CameraSpec("b", 3, 2))  # b as the robot gives it


def build(cfg, **changes):
    """A replay whose agent reads `CAMERAS`, and one that reads what is recorded."""
    recorded = preprocess(cfg, ("a", "b"))
    scaled = dataclasses.replace(recorded, cameras=CAMERAS)
    return Replay(SPEC, cfg, scaled, **changes), Replay(SPEC, cfg, recorded)


def as_jpeg(record):
    if not isinstance(record, StepBlock):
        return record
    sparse = {
        key: rows._replace(values=jpeg_images(*encode_jpeg(rows.values, 100), key)) if key == "images/a" else rows
        for key, rows in record.sparse.items()
    }
    return dataclasses.replace(record, sparse=sparse)


def same_windows(scaled, recorded):
    one, other = (replay.sample(RNG(0), 300) for replay in (scaled, recorded))
    for now, then in zip(
        (one.observations, one.next_observations), (other.observations, other.next_observations), strict=True
    ):
        np.testing.assert_array_equal(now["state"], then["state"])
        np.testing.assert_array_equal(now["images/a"], letterbox(then["images/a"], 6, 5))
        np.testing.assert_array_equal(now["images/b"], then["images/b"])


@pytest.mark.parametrize(("files", "cache"), [(False, 0), (True, 0), (True, 1 << 20)])
def test_demonstrations_are_scaled_in_memory_and_in_files(files, cache):
    replays = build(config(demo_fraction="uniform", frame_cache_bytes=cache))
    demos = [make(RNG(k), k, demonstration=True, end="success").episode() for k in range(6)]
    for replay in replays:
        replay.add_demo(*(lazy(d, final=True) if files else d for d in demos))
    same_windows(*replays)
    stats = replays[0].stats()
    assert (stats["replay/deferred_frames"] > 0) is files


def test_memory_is_counted_in_the_size_that_is_kept_and_the_journal_in_the_recorded_one():
    cfg = config()
    scaled, recorded = build(cfg)
    more = 3 * (6 * 5 - 2 * 4) * 3 * cfg.replay.image_capacity
    cached = 3 * (6 * 5 - 2 * 4) * cfg.replay.demo_capacity  # decoded frames of demonstrations in files
    assert scaled.estimated_bytes - recorded.estimated_bytes == more + cached
    assert scaled.estimated_disk_bytes == recorded.estimated_disk_bytes
    assert scaled.estimated_disk_bytes == estimate_disk_bytes(SPEC, cfg.replay, SPEC.cameras)


def test_frames_of_another_size_change_nothing():
    scaled, _ = build(config())
    begin, block, end = coded(0).episode()
    rows = block.sparse["images/a"]
    wrong = dataclasses.replace(block, sparse={"images/a": rows._replace(values=np.zeros((12, 6, 5, 3), np.uint8))})
    scaled.insert("s", begin)
    with pytest.raises(DataError, match="camera 'a'"):
        scaled.insert("s", wrong)
    with pytest.raises(DataError, match="camera 'a'"):
        scaled.add_demo(coded(1, demonstration=True).episode()._replace(steps=wrong))
    assert scaled.ready.steps == 0
    scaled.insert("s", block)
    scaled.insert("s", end)


@pytest.mark.parametrize("jpeg", [False, True])
def test_what_actors_record_is_scaled(jpeg):
    """And shards and streamed demonstrations."""
    replays = build(config(demo_fraction="uniform"))
    for number in range(8):
        for record in make(RNG(number), number).records(RNG(number)):
            for replay in replays:
                replay.insert("s", as_jpeg(record) if jpeg else record)
    for replay in replays:
        replay.replace_demos([coded(10 + k, demonstration=True).episode() for k in range(3)])
        replay.add_demo(coded(19, demonstration=True).episode(), session="t")
    same_windows(*replays)

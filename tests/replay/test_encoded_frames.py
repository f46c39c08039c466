"""Frames that arrive encoded are decoded when a batch shows them, and are then what they would have been as pixels."""

import dataclasses

import numpy as np
import pytest
from coded_episodes import Checker, config, feed, make
from coded_replay import RNG, build, read_held
from encoded_images import Encoded, Insert
from errors import naming

from serl_chunk.types import DataError


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(Encoded, "decoded", 0)


CFG = config(6, 4, demo_fraction="uniform")


def test_batches_are_the_same_and_no_frame_is_decoded_as_it_comes():
    """Those that were never shown go with their episode."""
    replay = build(config(6, 4, demo_fraction="uniform", capacity=200), image_keys=("a", "b"))
    episodes = [make(RNG(1), i, every_frame=True) for i in range(40)]
    feed(Insert(replay), episodes, RNG(0))
    held = replay._partitions.storage.frames
    assert 0 < sum(len(encoded._waiting) for encoded in held.encoded) <= sum(s.used for s in held.slots)
    assert Encoded.decoded == 0
    checker = Checker(episodes, CFG)
    checker.check(replay.sample(RNG(0), 8))
    few = Encoded.decoded
    checker.check(replay.sample(RNG(1), 3_000))
    all_of_them = Encoded.decoded
    checker.check(replay.sample(RNG(2), 3_000))
    assert 0 < few < all_of_them == Encoded.decoded  # each once
    for key in replay.episodes():
        read_held(replay, *key)


def test_a_frame_that_cannot_be_decoded_is_black_and_reported(caplog, monkeypatch):
    monkeypatch.setattr(Encoded, "broken", frozenset({2}))
    replay = build(CFG, image_keys=("a",))
    feed(Insert(replay), [make(RNG(1), 0, every_frame=True)], RNG(0))
    batch = replay.sample(RNG(0), 2_000)
    black = (batch.observations["images/a"] == 0).all(axis=(1, 2, 3))
    assert black.any()
    assert not black.all()
    assert replay.stats()["replay/undecodable_frames"] == 1
    assert "camera a: a frame of an actor cannot be decoded, and is black: damaged" in caplog.text


def test_images_of_another_size_are_refused_before_one_is_decoded():
    replay = build(CFG, image_keys=("a", "b"))
    begin, block, *_ = make(RNG(1), 0, every_frame=True).records(RNG(0))
    replay.insert("s", begin)
    rows = block.sparse["images/a"]
    huge = Encoded(np.broadcast_to(np.uint8(0), (len(rows.values), 4000, 4000, 3)))
    with pytest.raises(DataError, match=naming("a", huge.shape)):
        replay.insert("s", dataclasses.replace(block, sparse=block.sparse | {"images/a": rows._replace(values=huge)}))
    assert Encoded.decoded == 0

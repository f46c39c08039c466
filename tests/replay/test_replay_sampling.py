"""Halves, shares and reproducibility of what is drawn."""

import dataclasses

import numpy as np
import pytest
from coded_episodes import SPEC, config, feed, make, normaliser
from coded_replay import RNG, build, coded
from errors import naming

from serl_chunk.data.preprocess import Preprocess
from serl_chunk.replay.replay import Replay
from serl_chunk.types import DataError


@pytest.mark.parametrize("demonstration", [False, True])
def test_an_empty_half_gives_its_share_and_says_so(demonstration):
    replay = build(config(demo_fraction=0.5))
    with pytest.raises(DataError, match=naming(4, 0)):
        replay.sample(RNG(0), 8)
    assert replay.empty_half is None  # nothing was added yet
    if demonstration:
        replay.add_demo(coded(demonstration=True).episode())
    else:
        feed(replay, [coded()], RNG(0))
    assert replay.sample(RNG(0), 8).mask.shape == (8,)
    assert replay.empty_half == ("online" if demonstration else "demo")
    assert (replay.stats()["replay/demo_share"], replay.stats()["replay/empty_half"]) == (demonstration, 1)
    if demonstration:
        feed(replay, [coded(1)], RNG(0))
        assert replay.empty_half is None


def test_a_seed_reproduces_batches_and_they_never_change_afterwards():
    batches = []
    for wrapped in (False, True):
        replay = build(config(capacity=200, image_capacity=150), image_keys=("a",))
        replay.add_demo(coded(1000, demonstration=True).episode())
        feed(replay, [make(RNG(k), k, every_frame=True) for k in range(10)], RNG(0))
        batches.append(replay.sample(RNG(9), 32, updates=3))
        for k in range(20, 50 if wrapped else 20):  # several times round the ring
            feed(replay, [make(RNG(k), k, every_frame=True)], RNG(0))
            replay.sample(RNG(1), 64)
    for a, b in zip(*batches, strict=True):
        for x, y in zip(*(v.values() if isinstance(v, dict) else [v] for v in (a, b)), strict=True):
            np.testing.assert_array_equal(x, y)


def test_clipped_and_excluded_shares():
    episode = coded(length=10)
    episode.reads[0] = {0, 1, 2, 3}
    replay = build(config(4, 4, demo_fraction="uniform"), image_keys=("a",))
    feed(replay, [episode], RNG(0))
    assert replay.ready.windows == 0  # the window from 0 would bootstrap from 4, where the camera was not read
    assert replay.stats()["replay/excluded_share"] == 1
    episode.reads[0] = set(range(11))
    episode = dataclasses.replace(episode, number=1)
    feed(replay, [episode], RNG(0))
    assert replay.stats()["replay/excluded_share"] == 0.5
    batch = replay.sample(RNG(0), 50)
    clipped = (np.abs(batch.actions) > 1) & (batch.valid[..., None] > 0)
    assert 0 < clipped.mean() < 1
    assert replay.stats()["replay/clipped_share"] == pytest.approx(clipped.sum() / (batch.valid.sum() * 2))


def test_actions_outside_of_model_space_are_counted_where_episodes_come_in():
    replay, norm = build(config(4, 4)), normaliser(4)
    demo, online = coded(9, 12, demonstration=True), coded(1, 7)

    def outside(episode):
        """(numbers outside of [-1, 1], numbers) of every chunk of an episode's steps."""
        steps = episode.episode().steps
        chunks = [norm.encode(steps.observation["state"][t], steps.action[t : t + 4]) for t in range(steps.n)]
        return sum(int((np.abs(c) > 1).sum()) for c in chunks), sum(c.size for c in chunks)

    replay.add_demo(demo.episode())
    assert replay.outside_model_space == {"demo": outside(demo), "online": (0, 0)}
    feed(replay, [online], RNG(0))
    replay.insert("s", coded(2, 7).records(RNG(0))[0])  # of whole episodes alone
    assert replay.outside_model_space["online"] == outside(online)
    assert 0 < replay.outside_model_space["online"].outside < replay.outside_model_space["online"].numbers
    feed(replay, [dataclasses.replace(online, number=3, session="t")], RNG(0))
    assert replay.outside_model_space["online"].numbers == 2 * outside(online)[1]


def test_nothing_is_clipped_or_outside_where_model_space_has_no_bounds():
    cfg = config(4, 4)
    preprocess = Preprocess(dataclasses.replace(normaliser(4), mode="openpi"))
    replay = Replay(SPEC, cfg, preprocess)
    replay.add_demo(coded(9, 12, demonstration=True).episode())
    feed(replay, [coded(1, 7)], RNG(0))
    assert (np.abs(replay.sample(RNG(0), 100).actions) > 1).any()
    assert replay.stats()["replay/clipped_share"] == 0
    assert set(replay.outside_model_space.values()) == {(0, 0)}


@pytest.mark.parametrize(
    ("fraction", "size", "expected"), [(0.5, 256, 128), (0.25, 10, 3), (0.0, 64, 0), (1.0, 64, 64)]
)
def test_demo_fraction_is_exact_in_every_batch(fraction, size, expected):
    """A half that has no share is not missed."""
    replay = build(config(demo_fraction=fraction))
    if fraction:
        replay.add_demo(*(coded(1000 + k, demonstration=True).episode() for k in range(3)))
    if fraction < 1:
        feed(replay, [coded(k) for k in range(30)], RNG(0))
    assert replay.empty_half is None
    batch = replay.sample(RNG(0), size, updates=5)
    number = batch.observations["state"][..., 0] * 2 + 8
    np.testing.assert_array_equal((number >= 1000).sum(1), expected)
    assert replay.stats()["replay/demo_share"] == expected / size
    assert replay.stats()["replay/empty_half"] == 0

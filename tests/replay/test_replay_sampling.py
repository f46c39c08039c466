"""Halves, shares and reproducibility of what is drawn."""

import dataclasses

import numpy as np
import pytest
from coded_episodes import SPEC, Checker, config, feed, make, normaliser
from coded_replay import RNG, build, coded, windows
from errors import naming

from serl_chunk.data.preprocess import Preprocess
from serl_chunk.replay.replay import Replay
from serl_chunk.types import DataError, Source


@pytest.mark.parametrize(
    ("fraction", "size", "expected"), [(0.5, 256, 128), (0.25, 10, 3), (0.0, 64, 0), (1.0, 64, 64)]
)
def test_demo_fraction_is_exact_in_every_batch(fraction, size, expected):
    replay = build(config(demo_fraction=fraction))
    replay.add_demo(*(coded(1000 + k, demonstration=True).episode() for k in range(3)))
    feed(replay, [coded(k) for k in range(30)], RNG(0))
    batch = replay.sample(RNG(0), size, updates=5)
    number = batch.observations["state"][..., 0] * 2 + 8
    np.testing.assert_array_equal((number >= 1000).sum(1), expected)
    assert replay.stats()["replay/demo_share"] == expected / size
    assert replay.stats()["replay/empty_half"] == 0


def test_uniform_samples_by_window_counts():
    replay = build(config(4, 4, demo_fraction="uniform"))
    replay.add_demo(*(coded(1000 + k, demonstration=True).episode() for k in range(10)))
    feed(replay, [coded(k) for k in range(30)], RNG(0))
    number = replay.sample(RNG(0), 40_000).observations["state"][..., 0] * 2 + 8
    assert (number >= 1000).mean() == pytest.approx(0.25, abs=0.02)


def test_an_empty_half_gives_its_share_and_says_so():
    replay = build(config(demo_fraction=0.5))
    with pytest.raises(DataError, match=naming(4, 0)):
        replay.sample(RNG(0), 8)
    assert replay.empty_half is None  # nothing was added yet
    feed(replay, [coded()], RNG(0))
    assert replay.sample(RNG(0), 8).mask.shape == (8,)
    assert replay.empty_half == "demo"
    assert (replay.stats()["replay/demo_share"], replay.stats()["replay/empty_half"]) == (0, 1)
    only_demos = build(config(demo_fraction=0.5))
    only_demos.add_demo(coded(demonstration=True).episode())
    assert only_demos.sample(RNG(0), 8).mask.shape == (8,)
    assert only_demos.empty_half == "online"
    assert (only_demos.stats()["replay/demo_share"], only_demos.stats()["replay/empty_half"]) == (1, 1)
    feed(only_demos, [coded(1)], RNG(0))
    assert only_demos.empty_half is None


@pytest.mark.parametrize(("fraction", "demonstration"), [(0.0, False), (1.0, True), ("uniform", True)])
def test_a_half_that_has_no_share_is_not_missed(fraction, demonstration):
    replay = build(config(demo_fraction=fraction))
    if demonstration:
        replay.add_demo(coded(demonstration=True).episode())
    else:
        feed(replay, [coded()], RNG(0))
    assert replay.empty_half is None


def test_the_demo_half_takes_online_windows_that_start_on_intervened_steps():
    cfg = config(demo_fraction=1.0)
    episode = coded(length=20)
    episode.source[8:13] = Source.HUMAN
    episode.source[11] = Source.HOLD
    replay = build(cfg)
    feed(replay, [episode], RNG(0))
    assert {t for _, t in windows(replay, Checker([episode], cfg, image_keys=()))} == {8, 9, 10, 12}


def test_batches_never_change_afterwards():
    cfg = config(capacity=200, image_capacity=150)
    replay = build(cfg, image_keys=("a", "b"))
    feed(replay, [make(RNG(k), k, every_frame=True) for k in range(20)], RNG(0))
    batch = replay.sample(RNG(0), 64, updates=2)
    arrays = [
        *batch.observations.values(),
        *batch.next_observations.values(),
        *(v for v in batch if isinstance(v, np.ndarray)),
    ]
    copies = [a.copy() for a in arrays]
    for k in range(20, 60):  # wraps the ring several times
        feed(replay, [make(RNG(k), k, every_frame=True)], RNG(0))
        replay.sample(RNG(k), 64, updates=2)
    for array, copy in zip(arrays, copies, strict=True):
        np.testing.assert_array_equal(array, copy)


def test_a_seed_reproduces_batches():
    batches = []
    for _ in range(2):
        replay = build(config())
        replay.add_demo(coded(1000, demonstration=True).episode())
        feed(replay, [make(RNG(k), k) for k in range(10)], RNG(0))
        batches.append(replay.sample(RNG(9), 32, updates=3))
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


def encoded_outside(norm, episode):
    """(numbers outside of [-1, 1], numbers) of every chunk of an episode's steps."""
    steps = episode.episode().steps
    state, action = steps.observation["state"], steps.action
    chunks = [norm.encode(state[t], action[t : t + norm.horizon]) for t in range(len(action))]
    return sum(int((np.abs(c) > 1).sum()) for c in chunks), sum(c.size for c in chunks)


def test_actions_outside_of_model_space_are_counted_where_episodes_come_in():
    replay, norm = build(config(4, 4)), normaliser(4)
    demo, online = coded(9, 12, demonstration=True), coded(1, 7)
    replay.add_demo(demo.episode())
    assert replay.outside_model_space["demo"] == encoded_outside(norm, demo)
    assert replay.outside_model_space["online"] == (0, 0)
    feed(replay, [online], RNG(0))
    assert replay.outside_model_space["online"] == encoded_outside(norm, online)
    assert 0 < replay.outside_model_space["online"].outside < replay.outside_model_space["online"].numbers
    replay.insert("s", coded(2, 7).records(RNG(0))[0])
    assert replay.outside_model_space["online"] == encoded_outside(norm, online)  # of whole episodes alone
    feed(replay, [dataclasses.replace(online, number=3, session="t")], RNG(0))
    assert replay.outside_model_space["online"].numbers == 2 * encoded_outside(norm, online)[1]


def test_nothing_is_clipped_or_outside_where_model_space_has_no_bounds():
    cfg = config(4, 4)
    preprocess = Preprocess(dataclasses.replace(normaliser(4), mode="openpi"))
    replay = Replay(SPEC, cfg, preprocess)
    replay.add_demo(coded(9, 12, demonstration=True).episode())
    feed(replay, [coded(1, 7)], RNG(0))
    assert (np.abs(replay.sample(RNG(0), 100).actions) > 1).any()
    assert replay.stats()["replay/clipped_share"] == 0
    assert set(replay.outside_model_space.values()) == {(0, 0)}

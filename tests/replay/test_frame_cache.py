"""Demonstrations whose images stay in files: the same batches, within a bound of memory."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from coded_episodes import SPEC, Checker, config, feed, make, preprocess
from coded_replay import RNG, build, coded, windows
from deferred_episodes import Files, One, lazy
from errors import naming

from serl_chunk.replay.frame_storage import FrameCache, cached_frames, copy_frames, frame_caches
from serl_chunk.replay.replay import BatchLoader, Replay, Request
from serl_chunk.types import CameraSpec, DataError, Source, SparseRows


def same(a, b) -> None:
    for x, y in zip(a, b, strict=True):
        for key in x if isinstance(x, dict) else [None]:
            np.testing.assert_array_equal(x if key is None else x[key], y if key is None else y[key])


@pytest.mark.parametrize(("cache", "final"), [(0, True), (200, False), (1 << 30, True)])  # none, some frames, all
def test_batches_are_those_of_decoded_demonstrations(cache, final):
    rng = RNG(3)
    demos = [make(rng, k, demonstration=True) for k in range(12)]
    online = [make(rng, 20 + k) for k in range(5)]
    cfg = config(max_image_age=2, frame_cache_bytes=cache)
    replays = [build(cfg, image_keys=("a", "b")) for _ in range(2)]
    replays[0].add_demo(*(d.episode() for d in demos))
    replays[1].add_demo(*(lazy(d.episode(), final=final) for d in demos))
    for replay in replays:
        feed(replay, online, RNG(1))
    checker, rngs = Checker([*demos, *online], cfg), (RNG(0), RNG(0))
    for _ in range(4):
        same(*(replay.sample(r, 64, 2) for replay, r in zip(replays, rngs, strict=True)))
    assert windows(replays[1], checker)
    stats = replays[1].stats()
    if final:  # what a dead actor did not see is recorded nowhere
        expected = sum(len(ticks) for d in demos for ticks in d.reads)
        expected -= sum(d.length in ticks for d in demos if not d.has_final for ticks in d.reads)
        assert (stats["replay/deferred_frames"], stats["replay/demo_frames"]) == (expected, 0)
    assert stats["replay/deferred_frames"] > 0
    assert replays[0].stats()["replay/deferred_frames"] == 0


def test_ten_times_the_bound_is_sampled_within_the_bound():
    camera = CameraSpec("a", 32, 32)
    spec = dataclasses.replace(SPEC, cameras=(camera,))
    frame, bound, demos = 32 * 32 * 3, 400_000, []
    cfg = config(frame_cache_bytes=bound, image_capacity=50)
    replay = Replay(spec, cfg, preprocess(cfg, ("a",), spec))
    for k in range(44):  # 1,320 frames: image_capacity is for those that are held
        e = coded(k, 30, "success", demonstration=True).episode()
        images = RNG(k).integers(0, 256, (30, 32, 32, 3), np.uint8)
        final = {"state": e.end.final_observation["state"], "images/a": One(Files(images[:1]))}
        steps = dataclasses.replace(e.steps, sparse={"images/a": SparseRows(np.arange(30), Files(images))})
        demos.append(e._replace(steps=steps, end=e.end._replace(final_observation=final)))
    assert 44 * images.nbytes > 10 * bound
    replay.add_demo(*demos)
    for k in range(20):
        assert replay.sample(RNG(k), 64).observations["images/a"].shape == (64, 32, 32, 3)
    stats = replay.stats()
    assert bound - frame < stats["replay/frame_cache_bytes"] <= bound
    assert stats["replay/bytes"] < bound + 1_300 * 400  # bookkeeping of the rows
    assert 0 < stats["replay/frame_cache_misses"] < 1


def test_more_than_fits_is_decoded_once_per_batch_and_what_was_asked_for_longest_ago_makes_room():
    c, (first, second) = cache(3)
    for numbers in ((0, 1, 2), (0, 2), (5,), (0, 2, 5)):  # 5 for 1
        ask(c, *numbers)
    assert (first.decoded, second.decoded) == ([0, 1, 2], [1])
    ask(c, 1)
    assert first.decoded == [0, 1, 2, 1]
    c, (first, second) = cache(2)
    ask(c, 7, 3, 0, 3, 6, 0, 7)  # in the order of the files
    assert (first.decoded, second.decoded) == ([0, 3], [2, 3])
    assert (first.together, second.together) == ([[0, 3]], [[2, 3]])  # at one go each
    assert c.held_bytes == 2 * 12


DECODERS = ThreadPoolExecutor(2)
CAMERA = CameraSpec("a", 2, 2)


def cache(capacity, count=8, per_file=4):
    c = FrameCache(CAMERA, capacity, DECODERS)
    images = np.arange(count, dtype=np.uint8)[:, None, None, None] + np.zeros((1, 2, 2, 3), np.uint8)
    files = [Files(images[k : k + per_file]) for k in range(0, count, per_file)]
    assert np.concatenate([c.add(f) for f in files]).tolist() == list(range(count))
    return c, files


def ask(c, *numbers):
    out = np.zeros((len(numbers) + 1, 2, 2, 3), np.uint8)
    c.fill(out, np.arange(1, len(numbers) + 1), np.array(numbers))
    assert out[:, 0, 0, 0].tolist() == [0, *numbers]


def test_any_sequence_gives_the_frames_asked_for():
    """Also more at once than there are places, some of them held already, and some places still empty."""
    rng = RNG(0)
    for capacity in (0, 1, *[3, 5, 8] * 20, 20):
        c, _ = cache(capacity, 40, 5)
        for most in (max(2, capacity), *[3 * capacity + 2] * 3, *[12] * 5):
            ask(c, *rng.integers(0, 40, rng.integers(1, most)).tolist())
            places = c._place[: len(c)]
            assert (c._holds[places[places >= 0]] == np.flatnonzero(places >= 0)).all()
            assert (places >= 0).sum() == (c._holds >= 0).sum() <= capacity


def test_several_threads_ask_at_once():
    (c,) = frame_caches([CAMERA], 5 * 12, 100)
    images = np.arange(200, dtype=np.uint8)[:, None, None, None] + np.zeros((1, 2, 2, 3), np.uint8)
    for k in range(0, 200, 10):
        c.add(Files(images[k : k + 10]))

    def work(seed):
        rng = RNG(seed)
        for _ in range(30):
            ask(c, *rng.integers(0, 200, 20).tolist())

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_the_bound_is_shared_by_the_cameras():
    cameras = (CameraSpec("a", 10, 10), CameraSpec("b", 20, 10))
    assert cached_frames(cameras, 9_000, 1_000) == 10
    assert cached_frames(cameras, 9_000, 7) == 7
    assert sum(c.images.nbytes for c in frame_caches(cameras, 9_500, 1_000)) == 9_000
    assert frame_caches((), 9_000, 10) == []


class Broken(Files):
    def decode(self, at):
        raise DataError(f"cut.mp4, frame {at}: not a whole image")


def test_a_file_that_broke_meanwhile_is_named_where_the_batch_is_taken():
    episode = coded(0, 30, "limit", demonstration=True).episode()
    images = episode.steps.sparse["images/a"]
    sparse = episode.steps.sparse | {"images/a": SparseRows(images.index, Broken(images.values))}
    replay = build(config(), image_keys=("a",))
    replay.add_demo(episode._replace(steps=dataclasses.replace(episode.steps, sparse=sparse)))
    loader = BatchLoader(replay, RNG(0), prefetch=1)
    with pytest.raises(DataError, match=r"cut\.mp4, frame \d+"):
        loader.next(Request("critic", 1, 8))
    loader.close()


def test_frames_of_another_size_are_refused_when_they_come_and_when_they_change():
    episode = lazy(coded(0, 30, "limit", demonstration=True).episode())
    wrong = Files(np.zeros((30, 5, 5, 3), np.uint8))
    sparse = episode.steps.sparse | {"images/a": SparseRows(np.arange(30), wrong)}
    with pytest.raises(DataError, match=naming("e0", "'a'", "uint8(30, 5, 5, 3)")):
        build(config(), image_keys=("a",)).add_demo(
            episode._replace(steps=dataclasses.replace(episode.steps, sparse=sparse))
        )
    c, (first, _) = cache(3)
    first.images = np.zeros((4, 5, 5, 3), np.uint8)
    with pytest.raises(DataError, match=naming("'a'", "uint8(5, 5, 3)", "uint8(2, 2, 3)")):
        ask(c, 0)


def balanced(fraction, ends, *, online=(), **kw):
    replay = build(config(positive_fraction=fraction, demo_fraction=1.0), **kw)
    demos = [coded(k, 10 if end == "success" else 30, end, demonstration=True) for k, end in enumerate(ends)]
    replay.add_demo(*(d.episode() for d in demos))
    feed(replay, list(online), RNG(0))
    return replay


def numbers_of(replay, n=8_000):
    batch = replay.sample(RNG(1), n)
    norm = replay._preprocess.normaliser
    return np.rint(batch.observations["state"] * norm.state_std + norm.state_mean)[:, :2].astype(int)


@pytest.mark.parametrize(("fraction", "share"), [(0.25, 0.25), (0.9, 0.9), (None, 20 / 107)])
def test_the_share_of_successful_demonstrations_is_as_set_and_uniform_within(fraction, share):
    drawn = numbers_of(balanced(fraction, ["success", "failure", "success", "limit", "failure"]))
    good = np.isin(drawn[:, 0], [0, 2])
    assert good.mean() == pytest.approx(share, abs=0.03)
    for members in (drawn[good], drawn[~good]):
        _, counts = np.unique(members, axis=0, return_counts=True)
        assert len(counts) == (20 if members[0, 0] in (0, 2) else 30 + 30 + 27)
        expected = len(members) / len(counts)
        assert (np.abs(counts - expected) < 6 * np.sqrt(expected)).all()


def test_interventions_keep_their_share():
    online = coded(9, 30, "limit")
    online.source[5:15] = Source.HUMAN
    replay = balanced(0.5, ["success", "failure"], online=[online])
    added = len(replay._partitions.view_demo) - 40
    assert added == 10
    drawn = numbers_of(replay)
    assert (drawn[:, 0] == 9).mean() == pytest.approx(added / (40 + added), abs=0.03)
    assert (drawn[drawn[:, 0] != 9, 0] == 0).mean() == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("side", [4, 64])  # below and above what is copied one by one
def test_frames_are_copied_to_their_places(side):
    images = RNG(0).integers(0, 256, (9, side, side, 3), np.uint8)
    for at in (np.arange(5), np.array([4, 0, 2]), np.empty(0, int)):
        places = RNG(1).integers(0, 9, len(at))
        out, expected = np.zeros((5, side, side, 3), np.uint8), np.zeros((5, side, side, 3), np.uint8)
        copy_frames(out, at, images, places)
        expected[at] = images[places]
        np.testing.assert_array_equal(out, expected)

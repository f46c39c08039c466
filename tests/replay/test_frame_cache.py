"""Demonstrations whose images stay in files: the same batches, within a bound of memory."""

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from coded_episodes import SPEC, Checker, config, make, preprocess
from coded_replay import RNG, build, coded, read_held, windows
from deferred_episodes import Files, One, lazy
from errors import naming

from serl_chunk.replay.frame_cache import FrameCache, cached_frames, copy_frames, frame_caches
from serl_chunk.replay.replay import DEMO_SESSION, BatchLoader, Replay, Request
from serl_chunk.types import CameraSpec, ConfigError, DataError, Source, SparseRows


def same(a, b) -> None:
    for x, y in zip(a, b, strict=True):
        for key in x if isinstance(x, dict) else [None]:
            np.testing.assert_array_equal(x if key is None else x[key], y if key is None else y[key])


@pytest.mark.parametrize("cache", [0, 200, 1 << 30])  # none, some frames, all
@pytest.mark.parametrize("final", [False, True])
def test_batches_are_those_of_decoded_demonstrations(cache, final):
    rng = RNG(3)
    demos = [make(rng, k, demonstration=True) for k in range(12)]
    online = [make(rng, 20 + k) for k in range(5)]
    cfg = config(max_image_age=2, frame_cache_bytes=cache)
    replays = [build(cfg, image_keys=("a", "b")) for _ in range(2)]
    replays[0].add_demo(*(d.episode() for d in demos))
    replays[1].add_demo(*(lazy(d.episode(), final=final) for d in demos))
    for replay in replays:
        for e in online:
            for record in e.records(RNG(e.number)):
                replay.insert("s", record)
    checker, rngs = Checker([*demos, *online], cfg), (RNG(0), RNG(0))
    for _ in range(4):
        batches = [replay.sample(r, 64, 2) for replay, r in zip(replays, rngs, strict=True)]
        same(*batches)
    assert windows(replays[1], checker)
    stats = replays[1].stats()
    expected = sum(len(ticks) for d in demos for ticks in d.reads) if final else 0
    if final:  # what a dead actor did not see is recorded nowhere
        expected -= sum(d.length in ticks for d in demos if not d.has_final for ticks in d.reads)
        assert stats["replay/deferred_frames"] == expected
        assert stats["replay/demo_frames"] == 0
    assert stats["replay/deferred_frames"] > 0
    assert replays[0].stats()["replay/deferred_frames"] == 0


def test_an_export_of_a_deferred_demonstration_is_equal():
    demo = make(RNG(1), 7, demonstration=True, end="success", every_frame=True)
    replay = build(config(), image_keys=("a", "b"))
    replay.add_demo(lazy(demo.episode()))
    read, original = read_held(replay, DEMO_SESSION, "e7"), demo.episode()
    for key, rows in original.steps.sparse.items():
        np.testing.assert_array_equal(read.steps.sparse[key].index, rows.index)
        np.testing.assert_array_equal(read.steps.sparse[key].values, rows.values)


def test_ten_times_the_bound_is_sampled_within_the_bound():
    camera = CameraSpec("a", 32, 32)
    spec = dataclasses.replace(SPEC, cameras=(camera,))
    frame, bound = 32 * 32 * 3, 400_000
    cfg = config(frame_cache_bytes=bound, image_capacity=50)
    replay = Replay(spec, cfg, preprocess(cfg, ("a",), spec))
    demos, total = [], 0
    while total < 10 * bound:
        e = coded(len(demos), 30, "success", demonstration=True).episode()
        images = RNG(len(demos)).integers(0, 256, (30, 32, 32, 3), np.uint8)
        final = {"state": e.end.final_observation["state"], "images/a": One(Files(images[:1]))}
        steps = dataclasses.replace(e.steps, sparse={"images/a": SparseRows(np.arange(30), Files(images))})
        demos.append(e._replace(steps=steps, end=e.end._replace(final_observation=final)))
        total += images.nbytes
    replay.add_demo(*demos)  # 1,300 frames: image_capacity is for those that are held
    rng = RNG(0)
    for _ in range(20):
        batch = replay.sample(rng, 64)
    assert batch.observations["images/a"].shape == (64, 32, 32, 3)
    stats = replay.stats()
    assert bound - frame < stats["replay/frame_cache_bytes"] <= bound
    assert stats["replay/bytes"] < bound + 1_300 * 400  # bookkeeping of the rows
    assert 0 < stats["replay/frame_cache_misses"] < 1


def test_nothing_between_the_ends_of_a_window_is_decoded():
    episode = lazy(coded(0, 30, "limit", demonstration=True).episode())
    replay = build(config(horizon=6, critic_horizon=6), image_keys=("a",))
    replay.add_demo(episode)
    files = episode.steps.sparse["images/a"].values
    held = replay._partitions
    [row, *others] = np.flatnonzero(held.view_demo.contains(np.arange(held.storage.row_slots.capacity)))
    held.view_demo.discard(np.array(others))  # one window is left
    replay.sample(RNG(0), 8)
    t = int(held.storage.steps.tick[row])
    assert sorted(files.decoded) == [t, t + 6]
    replay.sample(RNG(0), 8)
    assert len(files.decoded) == 2  # the second time they are there


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


def test_what_was_asked_for_longest_ago_makes_room():
    c, (first, second) = cache(3)
    ask(c, 0, 1, 2)
    ask(c, 0, 2)
    ask(c, 5)  # for 1
    ask(c, 0, 2, 5)
    assert (first.decoded, second.decoded) == ([0, 1, 2], [1])
    ask(c, 1)
    assert first.decoded == [0, 1, 2, 1]


def test_more_than_fits_is_decoded_once_per_batch_and_in_the_order_of_the_files():
    c, (first, second) = cache(2)
    ask(c, 7, 3, 0, 3, 6, 0, 7)
    assert (first.decoded, second.decoded) == ([0, 3], [2, 3])
    assert (first.together, second.together) == ([[0, 3]], [[2, 3]])  # at one go each
    assert c.held_bytes == 2 * 12


def test_any_sequence_gives_the_frames_asked_for():
    rng = RNG(0)
    for capacity in (0, 1, 3, 20):
        c, _ = cache(capacity, 40, 5)
        for _ in range(50):
            ask(c, *rng.integers(0, 40, rng.integers(1, 12)).tolist())
        places = c._place[: len(c)]
        assert (c._holds[places[places >= 0]] == np.flatnonzero(places >= 0)).all()
        assert (places >= 0).sum() == (c._holds >= 0).sum() <= capacity


def test_a_cache_that_fills_up_within_one_batch_shows_no_foreign_frame():
    """More frames at once than there are places, some of them held already, and some places still empty."""
    rng = RNG(1)
    for _ in range(300):
        capacity = int(rng.integers(2, 9))
        c, _ = cache(capacity, 40, 5)
        ask(c, *rng.integers(0, 40, rng.integers(1, capacity)).tolist())
        for _ in range(3):
            ask(c, *rng.integers(0, 40, rng.integers(1, 3 * capacity)).tolist())
            places = c._place[c._place >= 0]
            assert len(set(places.tolist())) == len(places)


def test_several_threads_ask_at_once():
    (c,) = frame_caches([CAMERA], 5 * 12, 100)
    images = np.arange(200, dtype=np.uint8)[:, None, None, None] + np.zeros((1, 2, 2, 3), np.uint8)
    for k in range(0, 200, 10):
        c.add(Files(images[k : k + 10]))
    errors = []

    def work(seed):
        rng = RNG(seed)
        try:
            for _ in range(30):
                ask(c, *rng.integers(0, 200, 20).tolist())
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors


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


# -- replay.positive_fraction


def balanced(fraction, ends, *, online=(), **kw):
    replay = build(config(positive_fraction=fraction, demo_fraction=1.0), **kw)
    demos = [coded(k, 10 if end == "success" else 30, end, demonstration=True) for k, end in enumerate(ends)]
    replay.add_demo(*(d.episode() for d in demos))
    for e in online:
        for record in e.records(RNG(0)):
            replay.insert("s", record)
    return replay, demos


def numbers_of(replay, n=8_000):
    batch = replay.sample(RNG(1), n)
    norm = replay._preprocess.normaliser
    return np.rint(batch.observations["state"] * norm.state_std + norm.state_mean)[:, :2].astype(int)


@pytest.mark.parametrize("fraction", [0.25, 0.5, 0.9])
def test_the_share_of_successful_demonstrations_is_as_set_and_uniform_within(fraction):
    replay, _ = balanced(fraction, ["success", "failure", "success", "limit", "failure"])
    drawn = numbers_of(replay)
    good = np.isin(drawn[:, 0], [0, 2])
    assert good.mean() == pytest.approx(fraction, abs=0.03)
    for members in (drawn[good], drawn[~good]):
        _, counts = np.unique(members, axis=0, return_counts=True)
        assert len(counts) == (20 if members[0, 0] in (0, 2) else 30 + 30 + 27)
        expected = len(members) / len(counts)
        assert (np.abs(counts - expected) < 6 * np.sqrt(expected)).all()


def test_unset_it_is_uniform_and_changes_no_draw():
    ends = ["success", "failure", "success"]
    replay, demos = balanced(None, ends)
    drawn = numbers_of(replay)
    assert np.isin(drawn[:, 0], [0, 2]).mean() == pytest.approx(20 / 50, abs=0.03)
    assert windows(replay, Checker(demos, config(demo_fraction=1.0), image_keys=())) is not None


def test_interventions_keep_their_share():
    online = coded(9, 30, "limit")
    online.source[5:15] = Source.HUMAN
    replay, _ = balanced(0.5, ["success", "failure"], online=[online])
    added = len(replay._partitions.view_demo) - 40
    assert added == 10
    drawn = numbers_of(replay)
    assert (drawn[:, 0] == 9).mean() == pytest.approx(added / (40 + added), abs=0.03)
    assert (drawn[drawn[:, 0] != 9, 0] == 0).mean() == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize(
    ("ends", "named"),
    [
        (["failure", "limit"], ("replay.positive_fraction", 0.5, "1 failure", "1 unknown")),
        (["success", "success"], ("replay.positive_fraction", 0.5, "2 success")),
        ([], ("replay.positive_fraction", 0.5, "none", "demo_success")),
    ],
)
def test_a_class_without_windows_is_said_at_the_start(ends, named):
    with pytest.raises(DataError, match=naming(*named)):
        balanced(0.5, ends)


@pytest.mark.parametrize("value", [0.0, 1.0, -0.5, 1.5])
def test_a_fraction_that_is_none_is_refused(value):
    with pytest.raises(ConfigError, match=naming("replay.positive_fraction", value, 0, 1)):
        config(positive_fraction=value)


def test_a_negative_cache_is_refused():
    with pytest.raises(ConfigError, match=naming("replay.frame_cache_bytes", -1, 0)):
        config(frame_cache_bytes=-1)


@pytest.mark.parametrize("side", [4, 64])  # below and above what is copied one by one
def test_frames_are_copied_to_their_places(side):
    images = RNG(0).integers(0, 256, (9, side, side, 3), np.uint8)
    for at in (np.arange(5), np.array([4, 0, 2]), np.empty(0, int)):
        places = RNG(1).integers(0, 9, len(at))
        out, expected = np.zeros((5, side, side, 3), np.uint8), np.zeros((5, side, side, 3), np.uint8)
        copy_frames(out, at, images, places)
        expected[at] = images[places]
        np.testing.assert_array_equal(out, expected)

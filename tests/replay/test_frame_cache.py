"""Images in files, encoded, or of another size than the agent reads: the same batches, within a bound of memory."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from coded_episodes import SPEC, Checker, config, feed, make, preprocess
from coded_replay import RNG, build, coded, read_held, windows
from deferred_episodes import Files, One, lazy
from errors import naming

from serl_chunk.data.preprocess import letterbox
from serl_chunk.replay.frame_storage import FrameCache, copy_frames
from serl_chunk.replay.replay import BatchLoader, Replay, Request
from serl_chunk.transport.wire.jpeg import encode_jpeg, jpeg_images
from serl_chunk.types import CameraSpec, DataError, SparseRows, StepBlock


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
    assert stats["replay/deferred_frames"] > 0
    assert not (final and stats["replay/demo_frames"])


def test_ten_times_the_bound_is_sampled_within_the_bound():
    camera = CameraSpec("a", 32, 32)
    spec = dataclasses.replace(SPEC, cameras=(camera,))
    frame, bound, demos = 32 * 32 * 3, 400_000, []
    cfg = config(frame_cache_bytes=bound, image_capacity=50)
    replay = Replay(spec, cfg, preprocess(cfg, ("a",), spec), bc_on="+successes")
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


@pytest.mark.parametrize("side", [4, 64])  # below and above what is copied one by one
def test_frames_are_copied_to_their_places(side):
    images = RNG(0).integers(0, 256, (9, side, side, 3), np.uint8)
    for at in (np.arange(5), np.array([4, 0, 2]), np.empty(0, int)):
        places = RNG(1).integers(0, 9, len(at))
        out, expected = np.zeros((5, side, side, 3), np.uint8), np.zeros((5, side, side, 3), np.uint8)
        copy_frames(out, at, images, places)
        expected[at] = images[places]
        np.testing.assert_array_equal(out, expected)


class Encoded:
    """Images that count how often they are decoded; those of `broken` ticks cannot be."""

    dtype, ndim = np.dtype(np.uint8), 4
    decoded = 0
    broken = frozenset()

    def __init__(self, values: np.ndarray) -> None:
        self._values, self.shape, self.nbytes = values, values.shape, values.nbytes

    def __getitem__(self, i):
        if isinstance(i, int):
            Encoded.decoded += 1
            if int(self._values[i, 0, 0, 2]) in self.broken:
                raise DataError("damaged")
            return self._values[i]
        return Encoded(self._values[i])

    def __array__(self, dtype=None, copy=None):
        return np.stack([self[i] for i in range(len(self._values))])


def encoding(replay):
    """Hands the replay every record with encoded images."""

    def insert(session, record):
        if isinstance(record, StepBlock):
            rows = {k: SparseRows(r.index, Encoded(r.values)) for k, r in record.sparse.items()}
            record = dataclasses.replace(record, sparse=rows)
        return replay.insert(session, record)

    return SimpleNamespace(insert=insert)


@pytest.fixture
def none_decoded(monkeypatch):
    monkeypatch.setattr(Encoded, "decoded", 0)


ENCODED = config(6, 4, demo_fraction="uniform")


@pytest.mark.usefixtures("none_decoded")
def test_batches_are_the_same_and_no_encoded_frame_is_decoded_as_it_comes():
    """Those that were never shown go with their episode."""
    replay = build(config(6, 4, demo_fraction="uniform", capacity=200), image_keys=("a", "b"))
    episodes = [make(RNG(1), i, every_frame=True) for i in range(40)]
    feed(encoding(replay), episodes, RNG(0))
    held = replay._partitions.storage.frames
    assert 0 < sum(len(encoded._waiting) for encoded in held.encoded) <= sum(s.used for s in held.slots)
    assert Encoded.decoded == 0
    checker, decoded = Checker(episodes, ENCODED), []
    for seed, n in enumerate((8, 3_000, 3_000)):
        checker.check(replay.sample(RNG(seed), n))
        decoded.append(Encoded.decoded)
    assert 0 < decoded[0] < decoded[1] == decoded[2]  # each once
    for key in replay.episodes():
        read_held(replay, *key)


def test_a_frame_that_cannot_be_decoded_is_black_and_reported(caplog, monkeypatch):
    monkeypatch.setattr(Encoded, "broken", frozenset({2}))
    replay = build(ENCODED, image_keys=("a",))
    feed(encoding(replay), [make(RNG(1), 0, every_frame=True)], RNG(0))
    batch = replay.sample(RNG(0), 2_000)
    black = (batch.observations["images/a"] == 0).all(axis=(1, 2, 3))
    assert black.any()
    assert not black.all()
    assert replay.stats()["replay/undecodable_frames"] == 1
    assert "camera a: a frame of an actor cannot be decoded, and is black: damaged" in caplog.text


SMALLER = (CameraSpec("a", 6, 5), CameraSpec("b", 3, 2))  # b as the robot gives it


def scaled_and_recorded(cfg, **changes):
    """A replay whose agent reads `SMALLER`, and one that reads what is recorded."""
    recorded = preprocess(cfg, ("a", "b"))
    scaled = dataclasses.replace(recorded, cameras=SMALLER)
    return Replay(SPEC, cfg, scaled, bc_on="+successes", **changes), Replay(SPEC, cfg, recorded, bc_on="+successes")


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


def test_frames_of_another_size_change_nothing():
    scaled, _ = scaled_and_recorded(config())
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
    replays = scaled_and_recorded(config(demo_fraction="uniform"))
    for number in range(8):
        for record in make(RNG(number), number).records(RNG(number)):
            for replay in replays:
                replay.insert("s", as_jpeg(record) if jpeg else record)
    for replay in replays:
        replay.replace_demos([coded(10 + k, demonstration=True).episode() for k in range(3)])
        replay.add_demo(coded(19, demonstration=True).episode(), session="t")
    same_windows(*replays)

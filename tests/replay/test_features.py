"""Features are computed once for each stored frame, and those of a frame that left are never shown."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from coded_episodes import SPEC, Checker, config, feed, make
from coded_features import CodedEmbedder, with_pixels
from coded_replay import RNG, build, coded, read_held
from deferred_episodes import lazy
from errors import naming

from serl_chunk.learner.offline_data import PIECE, precompute_features
from serl_chunk.replay import replay as replay_module
from serl_chunk.replay.features import FeatureTable, Group
from serl_chunk.replay.memory import estimate_bytes
from serl_chunk.replay.replay import DEMO_SESSION, BatchLoader, Request
from serl_chunk.types import ConfigError

pytestmark = pytest.mark.compiles
KEYS = ("a", "b")


def replay_of(cfg, **kw):
    embed = CodedEmbedder()
    return build(cfg, image_keys=KEYS, embed=embed, **kw), embed


def check(replay, checker, seed=0, n=1_500):
    return checker.check(with_pixels(replay.sample(RNG(seed), n)))


@pytest.mark.parametrize("ahead", [False, True])
def test_every_frame_is_looked_at_once_wherever_it_lies(ahead):
    rng, cfg = RNG(0), config(max_image_age=2)
    demos = [make(rng, k, demonstration=True) for k in range(8)]
    online = [make(rng, 20 + k, session=f"s{k % 2}") for k in range(8)]
    replay, embed = replay_of(cfg)
    replay.add_demo(*(d.episode() for d in demos[:4]), *(lazy(d.episode()) for d in demos[4:]))
    feed(replay, online, rng)
    missing = replay.features_missing
    while ahead and replay.compute_features(7):
        pass
    assert replay.features_missing == (0 if ahead else missing)
    looked = len(embed.sizes)
    checker = Checker([*demos, *online], cfg)
    assert set.union(*(check(replay, checker, seed) for seed in range(4))) == checker.windows()
    assert set(embed.looked.values()) == {1}
    assert (looked == len(embed.sizes)) == ahead
    assert max(embed.sizes) <= 7 or not ahead
    stats = replay.stats()
    assert stats["replay/features_held"] == stats["replay/features_computed"] == len(embed.looked)
    assert stats["replay/feature_bytes"] == 12 * len(embed.looked)
    assert stats["replay/frame_cache_bytes"] == 0  # an image is looked at once: none stays decoded
    files = [source for cache in replay._partitions.storage.frames.deferred for source in cache._sources]
    assert sum(len(f.decoded) for f in files) > 20
    assert all(len(f.decoded) == len(set(f.decoded)) for f in files)
    read, original = read_held(replay, DEMO_SESSION, "e7"), demos[7].episode()
    for key in ("images/a", "images/b"):  # exports have their pixels
        np.testing.assert_array_equal(read.steps.sparse[key].values, original.steps.sparse[key].values)


def test_batches_are_right_while_records_come_in_from_elsewhere():
    cfg = config(capacity=300, human_capacity=100, image_capacity=200, demo_fraction="uniform", max_image_age=2)
    episodes = [make(RNG(k), k) for k in range(150)]
    replay, embed = replay_of(cfg)
    feed(replay, episodes[:5], RNG(0))
    loader, checker, count = BatchLoader(replay, RNG(0), prefetch=2), Checker(episodes, cfg), 0

    def write():
        for e in episodes[5:]:
            feed(replay, [e], RNG(1))
            replay.compute_features(3)

    def flat(value):
        if isinstance(value, dict):
            return {k: flat(v) for k, v in value.items()}
        return None if value is None else value.reshape(-1, *value.shape[2:])

    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(write)
        while not written.done() or count < 5:
            batch = loader.next(Request("critic", 2, 64))["critic"]
            checker.check(with_pixels(type(batch)(*map(flat, batch))), writing=True)
            count += 1
        written.result()
    loader.close()
    stats = replay.stats()
    assert stats["replay/evicted_episodes"] > 25
    assert stats["replay/kept_for_interventions"] > 10
    looked = list(embed.looked.values())  # both threads compute without the lock, now and then the same frame
    assert max(looked) <= 2
    assert looked.count(2) < 0.1 * len(looked)
    assert stats["replay/features_held"] <= stats["replay/online_frames"] + stats["replay/human_frames"]
    assert stats["replay/features_computed"] > 2 * stats["replay/features_held"]


def test_features_count_in_the_estimate_and_are_refused_where_they_do_not_fit(monkeypatch):
    cfg = config()
    need = estimate_bytes(SPEC, cfg.replay, SPEC.cameras, CodedEmbedder().features)
    replay, _ = replay_of(cfg)
    assert replay.stats()["replay/reserved_bytes"] == pytest.approx(need, rel=0.01)
    assert replay.estimated_bytes == need
    monkeypatch.setattr(replay_module, "available_bytes", lambda: need - 1)
    features = (3 * cfg.replay.image_capacity + cfg.replay.demo_capacity) * 2 * (12 + 9)
    cached = ("agent.encoder.cache_features", "False", f"{features / 2**20:.0f} MiB")
    with pytest.raises(ConfigError, match=naming("replay.image_capacity", "replay.demo_capacity", *cached)):
        replay_of(cfg)


def test_places_grow_where_more_frames_come_than_were_expected():
    features = FeatureTable(Group(("images/a",), {"five": (1, 2, 3)}), np.empty(0, np.int64), [0], 2)

    def compute(value):
        return features.computation(slots, lambda inputs: {"five": inputs["images/a"] + np.float16(value)}, frames, ())

    slots, frames = np.array([0, 1]), {"images/a": np.zeros((2, 1, 2, 3), np.float16)}
    features.placed(slots)
    early = compute(7)
    assert (compute(5)()["five"] == 5).all()
    features.placed(np.array([4, 2]))
    assert (features.known, features.missing, features.first_missing(9).tolist()) == (2, 2, [2, 4])
    values, known = features.read(np.array([1, 4]))
    assert known.tolist() == [True, False]
    assert (values["five"][0] == 5).all()
    features.released(np.array([0]))
    early()  # of 0 there is no frame any more
    assert (features.known, features.held_bytes) == (1, 12)


def test_what_is_there_at_first_is_computed_in_pieces():
    replay, embed = replay_of(config())
    replay.add_demo(*(coded(k, 39, "limit", demonstration=True).episode() for k in range(4)))
    total = replay.features_missing
    assert total == 4 * 40 * 2
    for rounds, _ in enumerate(itertools.takewhile(bool, precompute_features(replay))):
        if rounds == 1:  # what comes in meanwhile is not waited for
            feed(replay, [coded(9, 39)], RNG(0))
    assert total <= sum(embed.sizes) < total + PIECE
    assert replay.features_missing == total + 80 - sum(embed.sizes)
    bare = build(config(), image_keys=KEYS)
    feed(bare, [coded(9, 39)], RNG(0))
    for nothing in (replay_of(config())[0], bare):
        assert not list(precompute_features(nothing))
    assert (bare.features_missing, bare.compute_features(10)) == (0, 0)

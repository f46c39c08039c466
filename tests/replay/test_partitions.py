"""Who leaves a full store, and who stays."""

import pytest
from coded_episodes import LIMIT, Checker, config, feed
from coded_replay import RNG, build, coded, windows
from errors import naming

from serl_chunk.replay.replay import DEMO_SESSION
from serl_chunk.types import ConfigError


def test_eviction_is_whole_oldest_first_and_spares_open_episodes():
    cfg = config(capacity=60, demo_fraction="uniform")
    replay = build(cfg)
    old_and_open, episodes = coded(0, 10, session="slow"), [coded(k, 12) for k in range(1, 12)]
    *records, end = old_and_open.records(RNG(0))
    for record in records:
        replay.insert("slow", record)
    feed(replay, episodes, RNG(0))
    assert replay.episodes() == [("slow", "e0"), ("s", "e9"), ("s", "e10"), ("s", "e11")]
    replay.insert("slow", end)
    checker = Checker([old_and_open, *episodes[-3:]], cfg, image_keys=())
    assert windows(replay, checker) == checker.windows()


def test_open_episodes_go_only_when_nothing_else_is_left():
    replay = build(config(capacity=LIMIT + 1))
    first, second = coded(0, 30, session="a"), coded(1, 30, session="b")
    for record in first.records(RNG(0))[:-1]:
        replay.insert("a", record)
    for record in second.records(RNG(0)):
        replay.insert("b", record)
    replay.insert("a", first.end_record())
    assert replay.episodes() == [("b", "e1")]
    stats = replay.stats()
    assert (stats["replay/dropped_open_episodes"], stats["replay/orphan_records"]) == (1, 1)


def test_an_episode_longer_than_the_ring_is_dropped_whole():
    replay = build(config(capacity=LIMIT + 1))
    feed(replay, [coded(0, 60)], RNG(0))
    assert replay.episodes() == []
    assert replay.ready.windows == 0
    stats = replay.stats()
    assert stats["replay/orphan_steps"] + stats["replay/steps"] == 60
    feed(replay, [coded(1, 20)], RNG(0))
    assert replay.ready.windows > 0


def test_demonstrations_are_never_evicted_and_more_than_fit_are_refused():
    cfg = config(demo_capacity=30, capacity=LIMIT + 1)
    replay = build(cfg)
    demos = [coded(k, 12, demonstration=True) for k in range(3)]
    with pytest.raises(ConfigError, match=naming(39, "replay.demo_capacity", 30)):
        replay.add_demo(*(d.episode() for d in demos))
    assert replay.ready.demo == 0  # nothing was added
    replay.add_demo(*(d.episode() for d in demos[:2]))
    with pytest.raises(ConfigError, match=naming(39, "replay.demo_capacity", 30)):
        replay.add_demo(demos[2].episode())
    feed(replay, [coded(k, 30) for k in range(10, 20)], RNG(0))
    assert [key for key in replay.episodes() if key[0] == DEMO_SESSION] == [(DEMO_SESSION, "e0"), (DEMO_SESSION, "e1")]
    many = [coded(k, LIMIT // 2, demonstration=True) for k in range(2)]
    with pytest.raises(ConfigError, match=naming(42, "replay.image_capacity", 41)):
        build(config(image_capacity=LIMIT + 1), image_keys=("a",)).add_demo(*(d.episode() for d in many))


def test_capacity_below_one_episode_and_unknown_cameras_are_refused():
    with pytest.raises(ConfigError, match=naming("replay.capacity", LIMIT, LIMIT + 1)):
        build(config(capacity=LIMIT))
    with pytest.raises(ConfigError, match=naming("replay.image_capacity", LIMIT, LIMIT + 1)):
        build(config(image_capacity=LIMIT), image_keys=("a",))
    build(config(image_capacity=LIMIT))  # no camera, no frames
    with pytest.raises(ConfigError, match=naming("coded", "top", "a, b")):
        build(config(), image_keys=("top",))

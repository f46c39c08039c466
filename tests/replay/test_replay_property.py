"""Windows never mix episodes, ticks or pixels: 10^5 windows are decoded on every path into the replay."""

import threading

import numpy as np
import pytest
from coded_episodes import SPEC, Checker, config, feed, make, preprocess
from coded_replay import read_held

from serl_chunk.replay.replay import DEMO_SESSION, Replay
from serl_chunk.types import Amend, Outcome, Source

WINDOWS = 100_000
BATCH = 4_000


def build(cfg, *, image_keys=("a", "b"), **kw):
    return Replay(SPEC, cfg, preprocess(cfg, image_keys), **kw)


def draw_all(replay, checker, rng):
    """Check `WINDOWS` windows; returns which were seen."""
    seen = set()
    for _ in range(WINDOWS // BATCH):
        seen |= checker.check(replay.sample(rng, BATCH))
    return seen


def online(rng, count, first=0, **kw):
    return [make(rng, first + i, session=f"s{i % 3}", gaps=True, **kw) for i in range(count)]


@pytest.mark.parametrize("fraction", ["uniform", 0.5])
def test_fresh(fraction):
    rng = np.random.default_rng(0)
    cfg = config(max_image_age=2, demo_fraction=fraction)
    demos = [make(rng, 1000 + i, demonstration=True, session=DEMO_SESSION, gaps=True) for i in range(30)]
    episodes = online(rng, 60)
    replay = build(cfg)
    replay.add_demo(*(e.episode() for e in demos))
    feed(replay, episodes, rng)
    checker = Checker(demos + episodes, cfg)
    assert draw_all(replay, checker, rng) == checker.windows()
    assert replay.ready.windows == len(checker.windows())
    assert replay.ready.steps == sum(e.length for e in episodes)


def test_wrapped_ring_keeps_the_newest_whole_episodes():
    rng = np.random.default_rng(1)
    cfg = config(capacity=600, image_capacity=550, demo_fraction="uniform")
    episodes = online(rng, 300, human=False)
    replay = build(cfg)
    feed(replay, episodes, rng)
    held = {key[1] for key in replay.episodes()}
    checker = Checker([e for e in episodes if e.episode_id in held], cfg)
    assert draw_all(replay, checker, rng) == checker.windows()
    stats = replay.stats()
    assert stats["replay/evicted_episodes"] > 200
    assert stats["replay/online_rows"] <= 600
    assert stats["replay/online_frames"] <= 2 * 550


@pytest.mark.parametrize("fraction", ["uniform", 0.5])
def test_intervened_episodes_live_on_in_the_human_store(fraction):
    rng = np.random.default_rng(2)
    cfg = config(capacity=400, human_capacity=500, demo_fraction=fraction, max_image_age=1)
    episodes = online(rng, 200)
    replay = build(cfg)
    feed(replay, episodes, rng)
    stats = replay.stats()
    assert stats["replay/kept_for_interventions"] > 20
    assert 0 < stats["replay/human_rows"] <= 500
    keys = [key[1] for key in replay.episodes()]
    current, kept = keys[: int(stats["replay/online_episodes"])], keys[int(stats["replay/online_episodes"]) :]
    checker = Checker([e for e in episodes if e.episode_id in keys], cfg)
    retired = {e.number for e in episodes if e.episode_id in kept}
    sources = {e.number: e.source for e in episodes}
    expected = {(k, t) for k, t in checker.windows() if k not in retired or sources[k][t] == Source.HUMAN}
    assert len(current) + len(kept) == len(keys)
    assert draw_all(replay, checker, rng) == expected


def test_resumed_from_what_was_read_back():
    rng = np.random.default_rng(3)
    cfg = config(max_image_age=2, capacity=700, human_capacity=300)
    episodes = online(rng, 80)
    first = build(cfg)
    feed(first, episodes, rng)
    second = build(cfg)
    for session, episode_id in first.episodes():
        begin, steps, end = read_held(first, session, episode_id)
        for record in (begin, steps, end):
            second.insert(session, record)
    kept = {key[1] for key in second.episodes()}
    checker = Checker([e for e in episodes if e.episode_id in kept], cfg)
    assert len(kept) > 20
    assert draw_all(second, checker, rng) <= checker.windows()


def test_amended():
    rng = np.random.default_rng(4)
    cfg = config(max_image_age=2, demo_fraction="uniform")
    episodes = online(rng, 80)
    replay = build(cfg)
    feed(replay, episodes, rng)
    kept = []
    for i, e in enumerate(episodes):
        kind = i % 5
        if kind == 0:
            replay.insert(e.session, Amend(e.episode_id, discard=True))
            continue
        kept.append(e)
        if kind == 1:  # a late success label: terminal windows appear, policy steps are imitated
            e.terminated, e.outcome, e.last_reward = True, Outcome.SUCCESS, 16.0
            replay.insert(e.session, Amend(e.episode_id, Outcome.SUCCESS, "operator", True, 16.0))
        elif kind == 2:  # not an end after all: terminal windows go
            e.terminated, e.outcome = False, Outcome.UNKNOWN
            replay.insert(e.session, Amend(e.episode_id, Outcome.UNKNOWN, "operator", False))
        elif kind == 3:
            e.outcome = Outcome.FAILURE
            replay.insert(e.session, Amend(e.episode_id, Outcome.FAILURE, "classifier"))
    checker = Checker(kept, cfg)
    assert draw_all(replay, checker, rng) == checker.windows()
    assert replay.stats()["replay/discarded_episodes"] == 16


@pytest.mark.parametrize("capacity", [20_000, 900])
def test_concurrent_insert(capacity):
    rng = np.random.default_rng(5)
    cfg = config(max_image_age=2, capacity=capacity)
    demos = [make(rng, 1000 + i, demonstration=True, session=DEMO_SESSION, gaps=True) for i in range(5)]
    episodes = online(rng, 250)
    replay = build(cfg)
    replay.add_demo(*(e.episode() for e in demos))
    feeding = np.random.default_rng(6)
    writer = threading.Thread(target=feed, args=(replay, episodes, feeding))
    checker = Checker(demos + episodes, cfg)
    writer.start()
    drawn = during = 0
    while drawn < WINDOWS or writer.is_alive():
        checker.check(replay.sample(rng, 500), writing=True)
        drawn += 500
        during += writer.is_alive()
    writer.join()
    assert during > 0
    assert replay.ready.steps == sum(e.length for e in episodes)
    assert checker.check(replay.sample(rng, BATCH)) <= checker.windows()


@pytest.mark.parametrize("bc_on", ["all", "demo", "demo+interventions", "+successes", "interventions"])
@pytest.mark.parametrize(("horizon", "critic"), [(5, 5), (1, 1)])
def test_imitation_rules_lengths_and_dropped_terminal_windows(bc_on, horizon, critic):
    rng = np.random.default_rng(7)
    cfg = config(horizon, critic, terminal_windows="drop", demo_fraction="uniform")
    demos = [make(rng, 1000 + i, demonstration=True, session=DEMO_SESSION, gaps=True) for i in range(20)]
    episodes = online(rng, 40)
    replay = build(cfg, image_keys=("b",), bc_on=bc_on)
    replay.add_demo(*(e.episode() for e in demos))
    feed(replay, episodes, rng)
    checker = Checker(demos + episodes, cfg, image_keys=("b",), bc_on=bc_on)
    seen = set()
    for _ in range(5):
        batch = replay.sample(rng, BATCH)
        assert batch.valid[:, :critic].all()  # drop: every window is full
        seen |= checker.check(batch)
    assert seen == checker.windows()


@pytest.mark.parametrize(("horizon", "critic", "returned"), [(1, 1, 5), (4, 2, 3), (3, 3, 7), (6, 2, 2), (2, 5, 6)])
@pytest.mark.parametrize("terminal", ["keep", "drop"])
def test_returns_over_more_or_fewer_steps_than_the_chunk(horizon, critic, returned, terminal):
    rng = np.random.default_rng(8)
    cfg = config(horizon, critic, returned, terminal_windows=terminal, demo_fraction="uniform", max_image_age=2)
    episodes = online(rng, 60)
    replay = build(cfg)
    feed(replay, episodes, rng)
    checker, seen = Checker(episodes, cfg), set()
    for _ in range(5):
        batch = replay.sample(rng, BATCH)
        assert batch.rewards.shape == (BATCH, returned)
        assert batch.actions.shape[1] == max(horizon, critic)
        seen |= checker.check(batch)
    assert seen == checker.windows()

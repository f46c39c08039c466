import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest
from coded_episodes import LIMIT, SPEC, Checker, Coded, config, feed, make, normaliser

from serl_chunk.learner import replay as replay_module
from serl_chunk.learner.memory import available_bytes, estimate_bytes
from serl_chunk.learner.replay import DEMO_SESSION, Replay
from serl_chunk.types import (
    Amend,
    Begin,
    CameraSpec,
    ConfigError,
    DataError,
    End,
    Outcome,
    Source,
    SparseRows,
    StepBlock,
)

RNG = np.random.default_rng


def build(cfg, **kw):
    return Replay(SPEC, cfg, normaliser(cfg.chunk.horizon), **kw)


def coded(number=0, length=12, end="limit", **kw):
    every = [set(range(length + 1)) for _ in SPEC.cameras]
    return Coded(number, length, end, np.zeros(length, np.uint8), every, **kw)


def windows(replay, checker, *, n=3_000, **kw):
    return checker.check(replay.sample(RNG(0), n), **kw)


def test_no_window_holds_the_newest_step_of_an_open_episode():
    cfg = config(6, 4, demo_fraction="uniform")
    episode = coded(length=15, end="success")
    replay = build(cfg)
    replay.insert("s", Begin(episode.episode_id))
    for t in range(15):
        replay.insert("s", StepBlock.from_steps(episode.episode_id, [episode.step(t)]))
        assert replay.ready.windows == max(0, t - 3)
        if replay.ready.windows:
            batch = replay.sample(RNG(t), 200)
            start = batch.observations["state"][:, 1] * 0.5 - 4
            assert (start + batch.valid.sum(1)).max() == t  # valid steps end before the newest one
            np.testing.assert_array_equal(batch.mask, 1)
    replay.insert("s", episode.end_record())
    assert windows(replay, Checker([episode], cfg, image_keys=())) == {(0, t) for t in range(15)}


def test_an_end_corrects_the_last_reward_and_an_amendment_corrects_it_again():
    cfg = config(demo_fraction="uniform")
    episode = coded(end="success", last_reward=32.0)
    replay = build(cfg)
    feed(replay, [episode], RNG(0))
    windows(replay, Checker([episode], cfg, image_keys=()))
    replay.insert("s", Amend(episode.episode_id, reward=8.0))
    episode.last_reward = 8.0
    windows(replay, Checker([episode], cfg, image_keys=()))


def test_without_a_final_observation_the_last_step_serves_as_one():
    cfg = config(4, 4, demo_fraction="uniform")
    died, ended = coded(0, 8, "died"), coded(1, 8, "terminated_without_observation")
    replay = build(cfg)
    feed(replay, [died, ended], RNG(0))
    assert windows(replay, Checker([died, ended], cfg, image_keys=())) == {(0, t) for t in range(4)} | {
        (1, t) for t in range(8)
    }
    begin, steps, end = replay.read("s", died.episode_id)
    assert (begin.episode_id, steps.n, end.final_observation) == (died.episode_id, 8, None)


def test_a_silent_actor_that_comes_back_loses_nothing():
    finished = []
    cfg = config(demo_fraction="uniform")
    episode = coded(length=20, end="success")
    replay = build(cfg, on_episode=finished.append)
    begin, *blocks, end = episode.records(RNG(0))
    replay.insert("s", begin)
    for block in blocks:
        replay.insert("s", block)
        replay.close_session("s")
        replay.close_session("s")
        n = block.first_tick + block.n
        part = dataclasses.replace(episode, length=n, end="died", source=episode.source[:n])
        if replay.ready.windows:
            windows(replay, Checker([part], cfg, image_keys=()))
    assert not finished
    replay.insert("s", end)
    assert windows(replay, Checker([episode], cfg, image_keys=())) == {(0, t) for t in range(20)}
    assert [f.length for f in finished] == [20]
    replay.close_session("s")
    replay.close_session("never seen")
    assert replay.stats()["replay/online_rows"] == 21


def test_an_abandoned_episode_is_closed_when_its_session_begins_another():
    finished = []
    cfg = config(demo_fraction="uniform")
    first, second = coded(0, 9, "died"), coded(1, 9, "limit")
    replay = build(cfg, on_episode=finished.append)
    for record in first.records(RNG(0))[:-1] + second.records(RNG(0)):
        replay.insert("s", record)
    assert [(f.episode_id, f.outcome) for f in finished] == [("e0", Outcome.UNKNOWN), ("e1", Outcome.UNKNOWN)]
    checker = Checker([first, second], cfg, image_keys=())
    assert windows(replay, checker) == checker.windows()


def test_steps_that_repeat_or_skip_are_refused():
    episode = coded()
    replay = build(config())
    replay.insert("s", Begin(episode.episode_id))
    block = StepBlock.from_steps(episode.episode_id, [episode.step(0), episode.step(1)])
    assert replay.insert("s", block) == 2
    with pytest.raises(DataError, match="expected tick 2; steps came twice"):
        replay.insert("s", block)
    with pytest.raises(DataError, match="expected tick 2; steps before them are missing"):
        replay.insert("s", StepBlock.from_steps(episode.episode_id, [episode.step(3)]))
    with pytest.raises(DataError, match="ended with 12 steps, 2 arrived"):
        replay.insert("s", episode.end_record())
    with pytest.raises(DataError, match="amended before its end"):
        replay.insert("s", Amend(episode.episode_id, outcome=Outcome.SUCCESS))
    assert replay.insert("s", StepBlock.from_steps(episode.episode_id, [episode.step(2)])) == 1  # nothing was spoilt


def test_an_episode_cannot_begin_twice():
    replay = build(config())
    feed(replay, [coded()], RNG(0))
    with pytest.raises(DataError, match="began twice"):
        replay.insert("s", Begin("e0"))
    replay.insert("another session", Begin("e0"))  # ids are a session's own


def test_arrays_of_another_robot_are_refused():
    replay = build(config(), image_keys=("a",))
    replay.insert("s", Begin("e0"))
    block = StepBlock.from_steps("e0", [coded().step(0)])
    bad = {
        "state has shape": {"observation": {"state": np.zeros((1, 7), np.float32)}},
        "action has shape": {"action": np.zeros((1, 14), np.float32)},
        "action holds a number that is not finite": {"action": np.full((1, 2), np.nan, np.float32)},
        "frames of camera 'a'": {
            "sparse": {"images/a": SparseRows(np.zeros(1, int), np.zeros((1, 9, 9, 3), np.uint8))}
        },
    }
    for message, change in bad.items():
        with pytest.raises(DataError, match=message):
            replay.insert("s", dataclasses.replace(block, **change))
    replay.insert("s", block)
    with pytest.raises(DataError, match="final state has shape"):
        replay.insert("s", End("e0", 1, {"state": np.zeros(2, np.float32)}, True, False, Outcome.SUCCESS))


def test_records_of_episodes_not_held_are_counted():
    episode = coded()
    replay = build(config())
    for record in episode.records(RNG(0))[1:]:
        assert replay.insert("s", record) == 0
    replay.insert("s", Amend("e0", discard=True))
    stats = replay.stats()
    assert stats["replay/orphan_steps"] == 12
    assert stats["replay/steps"] == 0
    assert stats["replay/orphan_records"] == len(episode.records(RNG(0)))
    replay.insert("s", Begin("empty"))
    replay.insert("s", End("empty", 0, None, False, True, Outcome.UNKNOWN))
    assert replay.stats()["replay/empty_episodes"] == 1
    assert replay.episodes() == []


def test_eviction_is_whole_oldest_first_and_spares_open_episodes():
    cfg = config(capacity=60, demo_fraction="uniform")
    replay = build(cfg)
    old_and_open = coded(0, 10, session="slow")
    records = old_and_open.records(RNG(0))
    for record in records[:-1]:
        replay.insert("slow", record)
    episodes = [coded(k, 12) for k in range(1, 12)]
    feed(replay, episodes, RNG(0))
    assert replay.episodes() == [("slow", "e0"), ("s", "e9"), ("s", "e10"), ("s", "e11")]
    replay.insert("slow", records[-1])
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
    with pytest.raises(ConfigError, match=r"need 39 rows .* replay.demo_capacity is 30"):
        replay.add_demo(*(d.episode() for d in demos))
    assert replay.ready.demo == 0  # nothing was added
    replay.add_demo(*(d.episode() for d in demos[:2]))
    with pytest.raises(ConfigError, match="need 39 rows"):
        replay.add_demo(demos[2].episode())
    feed(replay, [coded(k, 30) for k in range(10, 20)], RNG(0))
    assert [key for key in replay.episodes() if key[0] == DEMO_SESSION] == [(DEMO_SESSION, "e0"), (DEMO_SESSION, "e1")]
    with pytest.raises(ConfigError, match=r"13 frames per camera; .* replay.image_capacity 12"):
        build(config(image_capacity=12), image_keys=("a",)).add_demo(demos[0].episode())


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
    with pytest.raises(DataError, match="no complete window"):
        replay.sample(RNG(0), 8)
    feed(replay, [coded()], RNG(0))
    assert replay.sample(RNG(0), 8).mask.shape == (8,)
    assert (replay.stats()["replay/demo_share"], replay.stats()["replay/empty_half"]) == (0, 1)
    only_demos = build(config(demo_fraction=0.5))
    only_demos.add_demo(coded(demonstration=True).episode())
    np.testing.assert_array_equal(only_demos.sample(RNG(0), 8).demonstrated[:, 0], 1)
    assert (only_demos.stats()["replay/demo_share"], only_demos.stats()["replay/empty_half"]) == (1, 1)


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
        *(v for v in batch if not isinstance(v, dict)),
    ]
    copies = [a.copy() for a in arrays]
    for k in range(20, 60):  # wraps the ring several times
        feed(replay, [make(RNG(k), k, every_frame=True)], RNG(0))
        replay.sample(RNG(k), 64, updates=2)
    for array, copy in zip(arrays, copies, strict=True):
        np.testing.assert_array_equal(array, copy)


def test_inserted_arrays_may_be_reused_by_the_caller():
    cfg = config(demo_fraction="uniform")
    episode = coded(end="limit")
    replay = build(cfg, image_keys=("a", "b"))
    for record in episode.records(RNG(0)):
        replay.insert("s", record)
        if isinstance(record, StepBlock):
            for array in (*record.observation.values(), record.action, *(r.values for r in record.sparse.values())):
                array[...] = 0
        elif isinstance(record, End):
            for array in record.final_observation.values():
                array[...] = 0
    windows(replay, Checker([episode], cfg))


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


def test_episode_figures():
    finished = []
    episode = coded(length=6, end="failure")
    episode.source[:] = [0, 1, 1, 2, 0, 0]
    replay = build(config(scale=1.0, offset=0.0, failure_reward=0.5), on_episode=finished.append)
    begin, *_, end = episode.records(RNG(0))
    steps = [episode.step(t)._replace(reward=float(t)) for t in range(6)]
    steps[0] = steps[0]._replace(decision={"q": np.float32(0.25)})
    steps[4] = steps[4]._replace(decision={"q": np.array([0.1, 0.75], np.float32)})  # candidates: the best was executed
    for record in (begin, StepBlock.from_steps("e0", steps[:3]), StepBlock.from_steps("e0", steps[3:]), end):
        replay.insert("s", record)
    (stats,) = finished
    assert (stats.session, stats.episode_id, stats.length, stats.episode_return) == ("s", "e0", 6, 15.0)
    assert (stats.success, stats.outcome, stats.human_ticks, stats.segments) == (False, Outcome.FAILURE, 3, 1)
    last = 4 + 0.5 * 0.5  # the declared failure's reward stands for the recorded 5
    assert stats.decisions == ((0.25, 1 / 2 + 2 / 4 + 3 / 8 + last / 16), (0.75, last))


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


def test_memory_of_a_full_replay_is_within_five_percent_of_its_unique_bytes():
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("resident memory is read from /proc")

    def resident() -> int:
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    side = 128
    spec = dataclasses.replace(SPEC, cameras=(CameraSpec("a", side, side), CameraSpec("b", side, side)))
    cfg = config(capacity=1_500, demo_capacity=100, human_capacity=100, image_capacity=1_500)
    images = {f"images/{c}": RNG(0).integers(0, 256, (40, side, side, 3), np.uint8) for c in "ab"}
    sparse = {key: SparseRows(np.arange(39), v[:39]) for key, v in images.items()}
    before = resident()
    replay = Replay(spec, cfg, normaliser(6), image_keys=("a", "b"))
    assert resident() - before < 2_000_000  # nothing is touched before it is needed
    for k in range(80):  # twice round the ring
        episode = coded(k, 39)
        steps = StepBlock.from_steps(episode.episode_id, [episode.step(t) for t in range(39)])
        final = episode.observation(39) | {key: v[39] for key, v in images.items()}
        replay.insert("s", Begin(episode.episode_id))
        replay.insert("s", dataclasses.replace(steps, sparse=sparse))
        replay.insert("s", episode.end_record()._replace(final_observation=final))
    stats = replay.stats()
    unique = int(stats["replay/online_frames"]) * side * side * 3
    assert stats["replay/online_frames"] == 2 * 1_480  # 37 whole episodes of 40 observations
    assert unique < resident() - before < 1.05 * unique
    assert unique < stats["replay/bytes"] < 1.05 * unique


def test_more_memory_than_there_is_is_refused(monkeypatch):
    cfg = config()
    need = estimate_bytes(SPEC, cfg.replay, SPEC.cameras)
    assert build(cfg, image_keys=("a", "b")).stats()["replay/reserved_bytes"] == pytest.approx(need, rel=0.01)
    monkeypatch.setattr(replay_module, "available_bytes", lambda: need - 1)
    with pytest.raises(ConfigError, match=r"lower replay\.image_capacity .* replay\.capacity"):
        build(cfg, image_keys=("a", "b"))
    build(cfg)  # without images there is room
    assert available_bytes() is None or available_bytes() > 0


def test_capacity_below_one_episode_and_unknown_cameras_are_refused():
    with pytest.raises(ConfigError, match=f"at least {LIMIT + 1}"):
        build(config(capacity=LIMIT))
    with pytest.raises(ConfigError, match="has no camera 'top'"):
        build(config(), image_keys=("top",))

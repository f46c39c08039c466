"""Records of sessions become episodes: ends, corrections, silence, what is refused; and who leaves a full store."""

import dataclasses
import itertools
import threading

import numpy as np
import pytest
from coded_episodes import LIMIT, Checker, config, feed, make
from coded_replay import RNG, build, coded, reading, windows
from deferred_episodes import lazy
from errors import naming
from hypothesis import given, settings
from hypothesis import strategies as st
from properties import examples

from serl_chunk.data.prompts import ByteTokenizer, Prompts
from serl_chunk.learner.offline_data import InitialData, OfflineData
from serl_chunk.replay.episode import accelerations, human_segments
from serl_chunk.replay.replay import BatchLoader, Request
from serl_chunk.replay.windows import IndexSet
from serl_chunk.runs.report.panels import REPLAY
from serl_chunk.types import (
    PROMPT,
    PROMPT_MASK,
    Amend,
    Begin,
    ConfigError,
    DataError,
    End,
    Episode,
    Outcome,
    RobotSpec,
    Source,
    SparseRows,
    StepBlock,
)


def test_a_silent_actor_that_comes_back_loses_nothing():
    """Its end corrects the last reward, and an amendment corrects it again."""
    cfg = config(demo_fraction="uniform")
    episode = coded(length=20, end="success", last_reward=32.0)
    replay = build(cfg)
    begin, *blocks, end = episode.records(RNG(0))
    replay.insert("s", begin)
    for block in blocks:
        replay.insert("s", block)
        for _ in range(2):
            replay.close_session("s")
        n = block.first_tick + block.n
        part = dataclasses.replace(episode, length=n, end="died", source=episode.source[:n], last_reward=None)
        if replay.ready.windows:
            windows(replay, Checker([part], cfg, image_keys=()))
    assert not replay.finished
    replay.insert("s", end)
    assert windows(replay, Checker([episode], cfg, image_keys=())) == {(0, t) for t in range(20)}
    replay.insert("s", Amend(episode.episode_id, reward=8.0))
    episode.last_reward = 8.0
    windows(replay, Checker([episode], cfg, image_keys=()))
    assert [f.length for f in replay.finished] == [20]
    for session in ("s", "never seen"):
        replay.close_session(session)
    assert replay.stats()["replay/online_rows"] == 21
    assert set(REPLAY) <= set(replay.stats())  # of these sizes the report tells


@pytest.mark.parametrize("silent_first", [False, True])
def test_the_episode_of_an_actor_that_is_gone_is_over_and_reported(silent_first):
    cfg = config(demo_fraction="uniform")
    episode, later = coded(0, 20, "success"), coded(1, 9, "success")
    episode.source[2:5] = Source.HUMAN
    replay = build(cfg)
    steps = [episode.step(t) for t in range(20)]
    replay.insert("s", Begin("e0"))
    replay.insert("s", StepBlock.from_steps("e0", steps[:12]))
    replay.insert("t", Begin("nothing was recorded"))
    if silent_first:
        replay.close_session("s")
    for session in ("s", "s", "t", "never seen"):
        replay.close_session(session, gone=True)
    # Human ticks are paid for, whether or not this actor ever comes back; whether it succeeded is unknown.
    assert [(f.episode_id, f.length, f.human_ticks, f.success) for f in replay.finished] == [("e0", 12, 3, None)]
    part = dataclasses.replace(episode, length=12, end="died", source=episode.source[:12])
    for held in ([part], [part, later]):
        checker = Checker(held, cfg, image_keys=())
        assert windows(replay, checker) == checker.windows()
        assert replay.insert("s", StepBlock.from_steps("e0", steps[12:])).steps == 0  # it comes back all the same
        if held == [part]:
            feed(replay, [later], RNG(0))
    assert [(f.episode_id, f.success) for f in replay.finished] == [("e0", None), ("e1", True)]
    assert (replay.stats()["replay/online_rows"], replay.stats()["replay/empty_episodes"]) == (13 + 10, 1)


def test_steps_that_repeat_or_skip_and_arrays_of_another_robot_are_refused():
    episode = coded(shared={1: (1, 0)})
    episode.source[1] = Source.HUMAN
    replay = build(config(), image_keys=("a",))
    replay.insert("s", Begin("e0"))
    block = StepBlock.from_steps("e0", [episode.step(0), episode.step(1)])
    rows = block.sparse["human_dims"]

    def sparse(name, values):
        return dataclasses.replace(block, sparse={name: SparseRows(np.zeros(1, int), values)})

    for record, named in (
        (
            dataclasses.replace(block, observation={"state": np.zeros((2, 7), np.float32)}),
            ("state", "(2, 7)", "(2, 3)"),
        ),
        (dataclasses.replace(block, action=np.full((2, 2), np.nan, np.float32)), ("action",)),
        (sparse("decision/q", np.zeros((1, 0), np.float32)), ("decision/q", "(1, 0)")),
        (sparse("images/a", np.zeros((1, 9, 9, 3), np.uint8)), ("'a'", "uint8(1, 9, 9, 3)", "uint8(1, 2, 4, 3)")),
        (dataclasses.replace(block, sparse={"human_dims": rows._replace(values=0 * rows.values)}), ("human_dims", 1)),
    ):
        with pytest.raises(DataError, match=naming("e0", *named)):
            replay.insert("s", record)
    assert replay.insert("s", block).steps == 2  # nothing was spoilt
    for record, named in (
        (block, (0, 2)),
        (StepBlock.from_steps("e0", [episode.step(3)]), (3, 2)),
        (episode.end_record(), (12, 2)),
        (Amend("e0", outcome=Outcome.SUCCESS), ("amended",)),
        (End("e0", 2, {"state": np.zeros(2, np.float32)}, True, False, Outcome.SUCCESS), ("state", "(2,)", "(3,)")),
    ):
        with pytest.raises(DataError, match=naming("e0", *named)):
            replay.insert("s", record)
    assert replay.insert("s", StepBlock.from_steps("e0", [episode.step(2)])).steps == 1
    replay.insert("another session", Begin("e0"))  # ids are a session's own
    feed(replay, [coded(1)], RNG(0))
    with pytest.raises(DataError, match=naming("e1", "'s'", "began")):
        replay.insert("s", Begin("e1"))


def test_episode_figures():
    episode = coded(length=6, end="failure")
    episode.source[:] = [0, 1, 1, 2, 0, 0]
    replay = build(config(scale=1.0, offset=0.0, failure_reward=0.5))
    begin, *_, end = episode.records(RNG(0))
    steps = [episode.step(t)._replace(reward=float(t)) for t in range(6)]
    first, best = {"q": 0.25, "values": [0.25, 0.375]}, {"q": 0.75, "values": [0.125, 0.75]}  # what acted
    steps[0] = steps[0]._replace(decision={name: np.float32(value) for name, value in first.items()})
    steps[4] = steps[4]._replace(decision={k: np.float32(v) for k, v in best.items()}, decision_tick=4)
    for record in (begin, StepBlock.from_steps("e0", steps[:3]), StepBlock.from_steps("e0", steps[3:]), end):
        replay.insert("s", record)
    (stats,) = replay.finished
    assert (stats.session, stats.episode_id, stats.length, stats.episode_return) == ("s", "e0", 6, 15.0)
    assert (stats.success, stats.human_ticks, stats.segments) == (False, 3, 1)
    last = 4 + 0.5 * 0.5  # the declared failure's reward stands for the recorded 5
    assert stats.decisions == ((0.25, 1 / 2 + 2 / 4 + 3 / 8 + last / 16), (0.75, last))
    assert stats.candidates == (0.5, (0.25 + 0.125) / 2, (0.375 + 0.75) / 2)


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


def test_an_episode_longer_than_the_ring_is_dropped_whole():
    replay = build(config(capacity=LIMIT + 1))
    feed(replay, [coded(0, 60)], RNG(0))
    assert replay.episodes() == []
    assert replay.ready.windows == 0
    stats = replay.stats()
    assert stats["replay/orphan_steps"] + stats["replay/steps"] == 60
    feed(replay, [coded(1, 20)], RNG(0))
    assert replay.ready.windows > 0


@pytest.mark.parametrize(
    ("values", "cameras", "named"),
    [
        ({"capacity": LIMIT}, (), ("replay.capacity", LIMIT, LIMIT + 1)),
        ({"image_capacity": LIMIT}, ("a",), ("replay.image_capacity", LIMIT, LIMIT + 1)),
        ({"image_capacity": LIMIT + 1}, ("a",), ("replay.image_capacity", 42, 41)),  # of demonstrations
        ({}, ("top",), ("coded", "top", "a, b")),
    ],
)
def test_capacities_and_cameras_that_are_refused(values, cameras, named):
    with pytest.raises(ConfigError, match=naming(*named)):
        build(config(**values), image_keys=cameras).add_demo(
            *(coded(k, LIMIT // 2, demonstration=True).episode() for k in range(2))
        )


P, U, H = Source.POLICY, Source.HUMAN, Source.HOLD


def test_a_robot_that_waits_for_its_chunk_is_not_a_humans():
    """Decided on tick 5, when the human had let go, and executed from tick 7 on."""
    source = np.array([P, P, U, H, U, H, H, P, P, U, H, P], np.uint8)
    for decided, end in ((6, 6), (0, 5), (-1, 7)):  # never less than the human's own, and all where it is not known
        decisions = np.array([0, 0, -1, -1, -1, -1, -1, decided, decided, -1, -1, 11], np.int32)
        np.testing.assert_array_equal(human_segments(source, decisions), [[2, end], [9, 11]])
    np.testing.assert_array_equal(human_segments(source), [[2, 7], [9, 11]])


CAPACITY = 24
rows = st.lists(st.integers(0, CAPACITY - 1), unique=True, max_size=CAPACITY)


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.tuples(st.booleans(), rows), max_size=12))
def test_behaves_like_a_set(calls):
    view, model = IndexSet(CAPACITY), set()
    for add, values in calls:
        array = np.array(values, np.int64)
        (view.add if add else view.discard)(array)
        model = model | set(values) if add else model - set(values)
        assert len(view) == len(model)
        assert set(np.flatnonzero(view.contains(np.arange(CAPACITY)))) == model


DT = 0.1
SPEC = RobotSpec(
    "r", 1 / DT, 3, (-9.0,) * 3, (9.0,) * 3, joint_of_action=(0, -1, 2), grippers=(2,), cameras=(), max_episode_steps=99
)


def actions(*jumps: tuple[int, int, float]) -> np.ndarray:
    """A joint that moves steadily and, from each tick on, by a jump's rad from where it was: (tick, dimension, rad)."""
    out = np.outer(0.01 * np.arange(20), [1, 0, 0]).astype(np.float32)
    for tick, k, way in jumps:
        out[tick:, k] += way
    return out


@pytest.mark.parametrize(
    ("jumps", "gaps", "seam", "others"),
    [
        ([(5, 0, 0.2)], [], 20.0, 0.0),  # it is taken over
        ([(5, 0, 0.1), (15, 0, 0.4)], [], 10.0, 40.0),
        ([(5, 1, 0.2), (5, 2, 0.2)], [], 0.0, 0.0),  # a velocity, and a gripper
        ([(5, 0, 0.2)], [5], 0.0, 0.0),  # in the middle of a gap
    ],
)
def test_the_largest_change_of_speed_at_seams_and_elsewhere(jumps, gaps, seam, others):
    found = accelerations(actions(*jumps), np.array([[5, 12]]), np.array(gaps, np.int64), SPEC)
    assert found == pytest.approx((seam, others), abs=1e-3)


EPISODES, SHARDS = 8, 6


def shard(number: int) -> list:
    """Its episodes are numbered from `16 * number` on."""
    rng = RNG(number)
    return [make(rng, 16 * number + k, demonstration=True) for k in range(EPISODES)]


def test_a_failure_in_a_later_shard_counts_from_then_on():
    def part(number: int, outcome: Outcome) -> list[Episode]:
        episodes = episodes_of(shard(number))
        return [e._replace(end=e.end._replace(outcome=outcome)) for e in episodes]

    parts = iter([part(0, Outcome.SUCCESS), part(1, Outcome.FAILURE), part(2, Outcome.SUCCESS)])

    class Shards:
        take = staticmethod(lambda: next(parts))
        advance = staticmethod(lambda: True)
        close = staticmethod(lambda: None)

    replay = build(config(demo_fraction=1.0), image_keys=("a", "b"))
    data = OfflineData(replay, InitialData([], Shards()), seek=None, seen=lambda episodes: None)
    found = [data.has_failures]
    for _ in range(2):
        data.advance(1)
        found.append(data.has_failures)
    assert found == [False, True, True]


def test_no_batch_mixes_two_shards_and_the_pool_does_not_grow():
    most = max(sum(e.length + 1 for e in shard(k)) for k in range(SHARDS))
    replay = build(config(demo_fraction=1.0, demo_capacity=most))
    shards = [episodes_of(shard(k)) for k in range(SHARDS)]
    replay.replace_demos(shards[0])
    loader = BatchLoader(replay, RNG(0), prefetch=2)
    done, seen = threading.Event(), []

    def turn():
        for k in itertools.takewhile(lambda _: not done.is_set(), itertools.count()):
            replay.replace_demos(shards[k % SHARDS])

    writer = threading.Thread(target=turn)
    writer.start()
    while len(seen) < 40 or (len(set(seen)) == 1 and len(seen) < 2_000):
        number = loader.next(Request("critic", 4, 64))["critic"].observations["state"][..., 0].astype(int) * 2 + 8
        (one,) = set((number // 16).ravel().tolist())
        seen.append(one)
        assert replay.stats()["replay/demo_rows"] <= most
    done.set()
    writer.join()
    loader.close()
    assert len(set(seen)) > 1
    assert replay._partitions.storage.row_slots.used == replay.stats()["replay/demo_rows"]


def test_what_does_not_fit_leaves_the_old_ones_in_place():
    replay = build(config(demo_capacity=60))
    replay.replace_demos([coded(0, 30, demonstration=True).episode()])
    replay.replace_demos([coded(1, 40, demonstration=True).episode()])  # not both: the old one leaves first
    before = replay.episodes()
    with pytest.raises(ConfigError, match=naming(82, "replay.demo_capacity", 60)):
        replay.replace_demos([coded(k, 40, demonstration=True).episode() for k in (2, 3)])
    twice = coded(4, 5, demonstration=True).episode()
    with pytest.raises(DataError, match=naming("e4")):
        replay.replace_demos([twice, twice])
    assert replay.episodes() == before
    assert replay.ready.demo == 37


def test_balance_is_checked_at_the_first_shard_and_a_later_one_may_lack_a_kind():
    good, bad = (coded(k, 12, end, demonstration=True).episode() for k, end in ((1, "success"), (2, "failure")))
    cfg = config(demo_fraction=1.0, positive_fraction=0.5)
    for demos, named in (([bad], "1 failure"), ([], "none")):
        with pytest.raises(DataError, match=naming("replay.positive_fraction", 0.5, named)):
            build(cfg).replace_demos(demos)
    replay = build(cfg)
    replay.replace_demos([good, bad])
    for alone in (good, bad):
        replay.replace_demos([alone])
        assert set(replay.sample(RNG(0), 50).observations["state"][:, 0] * 2 + 8) == {1.0 if alone is good else 2.0}
    replay.replace_demos([good, bad])
    share = (replay.sample(RNG(0), 2_000).observations["state"][:, 0] * 2 + 8 == 1).mean()
    assert share == pytest.approx(0.5, abs=0.05)
    assert replay.stats()["replay/positive_share"] == pytest.approx((50 + 2_000 * share) / 2_100)


def test_images_that_are_still_in_files_are_refused_where_they_are_used():
    files = lazy(coded(0, 10, demonstration=True).episode())
    seeing, blind = build(config(), image_keys=("a",)), build(config())
    with pytest.raises(DataError, match=naming("e0", "agent.image_keys", "demo_path")):
        seeing.replace_demos([files])
    assert seeing.episodes() == []
    blind.replace_demos([files])
    assert len(blind.episodes()) == 1


def episodes_of(coded_ones) -> list[Episode]:
    return [e.episode() for e in coded_ones]


OWN, LENGTH = "own task", 16
PROMPTS = Prompts(ByteTokenizer(), LENGTH)


def text_of(number: int) -> str:
    """Every sixth episode has no text of its own."""
    return "" if number % 6 == 0 else f"task {number % 5}"


def records(episode, rng):
    begin, *rest = episode.records(rng)
    return [begin._replace(task=text_of(episode.number)), *rest]


def episode_of(number, **kw):
    whole = coded(number, demonstration=True, **kw).episode()
    return whole._replace(begin=whole.begin._replace(task=text_of(number)))


def check(replay, n=500):
    """Both observations of every window have the text of the episode that their state names; returns the episodes."""
    batch = replay.sample(RNG(0), n)
    mean, std = np.array([8, -4, 2]), np.array([2, 0.5, 4])
    for observation in (batch.observations, batch.next_observations):
        tokens, mask = observation[PROMPT], observation[PROMPT_MASK]
        assert (tokens.shape, tokens.dtype, mask.shape, mask.dtype) == ((n, LENGTH), np.int32, (n, LENGTH), np.bool_)
        numbers = np.rint((observation["state"] * std + mean)[:, 0]).astype(int).tolist()
        for number, row, shown in zip(numbers, tokens, mask, strict=True):
            expected = PROMPTS(text_of(number) or OWN)
            np.testing.assert_array_equal(row, expected[0])
            np.testing.assert_array_equal(shown, expected[1])
    return set(numbers)


def test_texts_are_mixed_and_stay_with_their_episodes_while_others_leave():
    rng = RNG(1)
    replay = build(reading(LENGTH, OWN, capacity=150, human_capacity=60))
    replay.add_demo(*(episode_of(1000 + i) for i in range(4)))
    for i in range(60):  # several times round the ring, with interventions that are kept
        episode = coded(i, end=("success", "limit", "died")[i % 3])
        if i % 4 == 0:
            episode.source[3:6] = Source.HUMAN
        for record in records(episode, rng):
            replay.insert("s", record)
        check(replay, 60)
    seen = check(replay)
    assert {1000, 1001, 1002, 1003} < seen
    assert replay.stats()["replay/kept_for_interventions"] > 0
    assert replay.stats()["replay/evicted_episodes"] > 0
    assert replay.stats()["replay/tasks"] == 6


def test_shards_bring_their_texts():
    replay = build(reading(LENGTH, OWN, windows="qc", terminal_windows="drop"))
    for start in (0, 10, 20):
        replay.replace_demos([episode_of(start + i) for i in range(5)])
        assert check(replay) == {*range(start, start + 5)}


def test_a_text_that_is_too_long_is_refused_and_nothing_is_kept():
    replay = build(reading(LENGTH, OWN))
    text = "a text of more than sixteen bytes"
    with pytest.raises(DataError, match=naming("e9", text, 34, LENGTH)):
        replay.insert("s", Begin("e9", task=text))
    whole = episode_of(3)
    with pytest.raises(DataError, match=naming("e3", text, 34, LENGTH)):
        replay.add_demo(whole._replace(begin=whole.begin._replace(task=text)))
    assert replay.episodes() == []
    replay.insert("s", Begin("e10", task="short"))

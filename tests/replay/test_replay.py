"""Records of sessions become episodes: ends, corrections, silence, what is refused; and who leaves a full store."""

import dataclasses

import numpy as np
import pytest
from coded_episodes import LIMIT, Checker, config, feed
from coded_replay import RNG, build, coded, windows
from errors import naming
from hypothesis import given, settings
from hypothesis import strategies as st
from properties import examples

from serl_chunk.replay.episode import accelerations, human_segments
from serl_chunk.replay.replay import DEMO_SESSION
from serl_chunk.replay.windows import IndexSet
from serl_chunk.runs.report.panels import REPLAY
from serl_chunk.types import (
    Amend,
    Begin,
    ConfigError,
    DataError,
    End,
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
        (block, (0, 2)), (StepBlock.from_steps("e0", [episode.step(3)]), (3, 2)), (episode.end_record(), (12, 2)),
        (Amend("e0", outcome=Outcome.SUCCESS), ("amended",)),
        (End("e0", 2, {"state": np.zeros(2, np.float32)}, True, False, Outcome.SUCCESS), ("state", "(2,)", "(3,)")),
    ):  # fmt: skip
        with pytest.raises(DataError, match=naming("e0", *named)):
            replay.insert("s", record)
    assert replay.insert("s", StepBlock.from_steps("e0", [episode.step(2)])).steps == 1
    replay.insert("another session", Begin("e0"))  # ids are a session's own
    feed(replay, [coded(1)], RNG(0))
    with pytest.raises(DataError, match=naming("e1", "'s'", "began")):
        replay.insert("s", Begin("e1"))


def test_records_of_episodes_not_held_are_counted():
    episode = coded()
    replay = build(config())
    orphans = [*episode.records(RNG(0))[1:], Amend("e0", discard=True)]
    assert [replay.insert("s", record).steps for record in orphans] == [0] * len(orphans)
    stats = replay.stats()
    assert (stats["replay/orphan_steps"], stats["replay/steps"]) == (12, 0)
    assert stats["replay/orphan_records"] == len(orphans)
    replay.insert("s", Begin("empty"))
    replay.insert("s", End("empty", 0, None, False, True, Outcome.UNKNOWN))
    assert replay.stats()["replay/empty_episodes"] == 1
    assert replay.episodes() == []


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


def test_episode_figures():
    episode = coded(length=6, end="failure")
    episode.source[:] = [0, 1, 1, 2, 0, 0]
    replay = build(config(scale=1.0, offset=0.0, failure_reward=0.5))
    begin, *_, end = episode.records(RNG(0))
    steps = [episode.step(t)._replace(reward=float(t)) for t in range(6)]
    steps[0] = steps[0]._replace(decision={"q": np.float32(0.25)})
    candidates = {"q": np.array([0.1, 0.75], np.float32)}  # the best was executed
    steps[4] = steps[4]._replace(decision=candidates, decision_tick=4)
    for record in (begin, StepBlock.from_steps("e0", steps[:3]), StepBlock.from_steps("e0", steps[3:]), end):
        replay.insert("s", record)
    (stats,) = replay.finished
    assert (stats.session, stats.episode_id, stats.length, stats.episode_return) == ("s", "e0", 6, 15.0)
    assert (stats.success, stats.human_ticks, stats.segments) == (False, 3, 1)
    last = 4 + 0.5 * 0.5  # the declared failure's reward stands for the recorded 5
    assert stats.decisions == ((0.25, 1 / 2 + 2 / 4 + 3 / 8 + last / 16), (0.75, last))


@pytest.mark.parametrize(
    ("end", "lost", "known"),
    [("failure", {}, range(6)), ("limit", {}, ()), ("success", {3: 100}, range(4, 6))],  # none across a gap
)
def test_a_return_is_realised_where_the_task_terminated(end, lost, known):
    replay = build(config(scale=1.0, offset=0.0))
    online = coded(2, 6, end, lost=lost)
    begin, *_, last = online.records(RNG(0))
    steps = [online.step(t)._replace(decision={"q": np.float32(t)}) for t in range(6)]
    for record in (begin, StepBlock.from_steps("e2", steps), last):
        replay.insert("s", record)
    assert [q for q, g in replay.finished[0].decisions if g is not None] == [*known]


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
    replay = build(config(demo_capacity=30, capacity=LIMIT + 1))
    demos = [coded(k, 12, demonstration=True).episode() for k in range(3)]
    with pytest.raises(ConfigError, match=naming(39, "replay.demo_capacity", 30)):
        replay.add_demo(*demos)
    assert replay.ready.demo == 0  # nothing was added
    replay.add_demo(*demos[:2])
    with pytest.raises(ConfigError, match=naming(39, "replay.demo_capacity", 30)):
        replay.add_demo(demos[2])
    feed(replay, [coded(k, 30) for k in range(10, 20)], RNG(0))
    assert [key for key in replay.episodes() if key[0] == DEMO_SESSION] == [(DEMO_SESSION, "e0"), (DEMO_SESSION, "e1")]


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


def test_segments_go_on_through_idle_ticks_but_do_not_start_on_them():
    np.testing.assert_array_equal(human_segments(np.array([P, H, U, U, H, U, H, P, H, P, U])), [[2, 7], [10, 11]])
    assert human_segments(np.array([P, H, H])).shape == (0, 2)


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


def test_without_seams_or_joints_there_is_nothing_to_report():
    none = np.empty(0, np.int64)
    assert accelerations(actions((5, 0, 0.1)), none.reshape(0, 2), none, SPEC) == pytest.approx((None, 10.0))
    twists = dataclasses.replace(SPEC, joint_of_action=(-1,) * 3)
    assert accelerations(actions(), np.array([[5, 12]]), none, twists) == (None, None)
    assert accelerations(actions()[:2], np.array([[0, 1]]), none, SPEC) == (None, None)

"""Records of sessions become episodes: ends, corrections, silence, and what is refused."""

import dataclasses

import numpy as np
import pytest
from coded_episodes import Checker, config, feed
from coded_replay import RNG, build, coded, windows
from errors import naming

from serl_chunk.runs.report.panels import REPLAY
from serl_chunk.types import Amend, Begin, DataError, End, Outcome, Source, SparseRows, StepBlock


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


def test_an_abandoned_episode_is_closed_when_its_session_begins_another():
    cfg = config(demo_fraction="uniform")
    first, second = coded(0, 9, "died"), coded(1, 9, "limit")
    replay = build(cfg)
    for record in first.records(RNG(0))[:-1] + second.records(RNG(0)):
        replay.insert("s", record)
    assert [f.episode_id for f in replay.finished] == ["e0", "e1"]
    assert [f.success for f in replay.finished] == [None, False]  # a time limit is no success, and that is known
    assert replay.stats()["replay/episodes"] == 2
    checker = Checker([first, second], cfg, image_keys=())
    assert windows(replay, checker) == checker.windows()


def test_steps_that_repeat_or_skip_are_refused():
    episode = coded()
    replay = build(config())
    replay.insert("s", Begin("e0"))
    block = StepBlock.from_steps("e0", [episode.step(0), episode.step(1)])
    assert replay.insert("s", block).steps == 2
    for record, named in (
        (block, (0, 2)),
        (StepBlock.from_steps("e0", [episode.step(3)]), (3, 2)),
        (episode.end_record(), (12, 2)),
        (Amend("e0", outcome=Outcome.SUCCESS), ("amended",)),
    ):
        with pytest.raises(DataError, match=naming("e0", "'s'", *named)):
            replay.insert("s", record)
    assert replay.insert("s", StepBlock.from_steps("e0", [episode.step(2)])).steps == 1  # nothing was spoilt
    replay.insert("another session", Begin("e0"))  # ids are a session's own


def test_an_episode_cannot_begin_twice():
    replay = build(config())
    feed(replay, [coded()], RNG(0))
    with pytest.raises(DataError, match=naming("e0", "'s'", "began")):
        replay.insert("s", Begin("e0"))


def test_arrays_of_another_robot_are_refused():
    replay = build(config(), image_keys=("a",))
    replay.insert("s", Begin("e0"))
    block = StepBlock.from_steps("e0", [coded().step(0)])
    bad = {
        ("e0", "state", "(1, 7)", "(1, 3)"): {"observation": {"state": np.zeros((1, 7), np.float32)}},
        ("e0", "action", "(1, 14)", "(1, 2)"): {"action": np.zeros((1, 14), np.float32)},
        ("e0", "action"): {"action": np.full((1, 2), np.nan, np.float32)},
        ("e0", "decision/q", "(1, 0)"): {
            "sparse": {"decision/q": SparseRows(np.zeros(1, int), np.zeros((1, 0), np.float32))}
        },
        ("e0", "'a'", "uint8(1, 9, 9, 3)", "uint8(1, 2, 4, 3)"): {
            "sparse": {"images/a": SparseRows(np.zeros(1, int), np.zeros((1, 9, 9, 3), np.uint8))}
        },
    }
    for named, change in bad.items():
        with pytest.raises(DataError, match=naming(*named)):
            replay.insert("s", dataclasses.replace(block, **change))
    replay.insert("s", block)
    with pytest.raises(DataError, match=naming("e0", "state", "(2,)", "(3,)")):
        replay.insert("s", End("e0", 1, {"state": np.zeros(2, np.float32)}, True, False, Outcome.SUCCESS))


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
    [
        ("success", {}, range(6)),
        ("failure", {}, range(6)),
        ("limit", {}, ()),
        ("died", {}, ()),
        ("success", {3: 100}, range(4, 6)),  # nothing realised across a gap is reported
    ],
)
def test_a_return_is_realised_where_the_task_terminated(end, lost, known):
    replay = build(config(scale=1.0, offset=0.0))
    online = coded(2, 6, end, lost=lost)
    begin, *_, last = online.records(RNG(0))
    steps = [online.step(t)._replace(decision={"q": np.float32(t)}) for t in range(6)]
    for record in (begin, StepBlock.from_steps("e2", steps), last):
        replay.insert("s", record)
    assert [q for q, g in replay.finished[0].decisions if g is not None] == [*known]

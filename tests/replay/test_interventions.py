"""Windows around interventions: all are sampled, also after corrections, restarts and silence."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from coded_episodes import LIMIT, SPEC, Checker, Coded, config, feed, make, normaliser, preprocess
from coded_replay import read_held
from hypothesis import given, settings
from hypothesis import strategies as st
from properties import examples

from serl_chunk.replay.replay import Replay
from serl_chunk.types import Amend, Outcome, Source, StepBlock

P, U, H, S, R = Source.POLICY, Source.HUMAN, Source.HOLD, Source.SCRIPTED, Source.RANDOM
EVERY = [set(range(LIMIT + 1)) for _ in SPEC.cameras]


def build(cfg, *, image_keys=("a", "b"), **kw):
    return Replay(SPEC, cfg, preprocess(cfg, image_keys), **kw)


def check_all(replay, episodes, cfg, *, n=1_500):
    """Check that every window that may be sampled is, and says what it should."""
    checker = Checker(episodes, cfg)
    if not replay.ready.windows:
        assert not checker.windows()
        return
    batch = replay.sample(np.random.default_rng(0), n)
    assert checker.check(batch) <= checker.windows()
    assert replay.ready.windows == len(checker.windows())


def episode(text: str, end: str = "limit", **kw) -> Coded:
    letters = {"p": P, "u": U, "h": H, "s": S, "r": R}
    source = np.array([letters[c] for c in text], np.uint8)
    return Coded(0, len(source), end, source, EVERY, **kw)


def test_a_window_goes_on_into_the_humans_steps():
    cfg = config(4, 4, demo_fraction="uniform", offset=0.0, scale=1.0)
    e = episode("pppppphuuuu")
    replay = build(cfg)
    feed(replay, [e], np.random.default_rng(0))
    checker = Checker([e], cfg)
    batch = replay.sample(np.random.default_rng(0), 400)
    checker.check(batch)
    tick = (batch.observations["state"] * checker.norm.state_std + checker.norm.state_mean)[:, 1]
    first = int(np.flatnonzero(tick == 5)[0])  # the policy's last step, a hold, and the human from tick 7 on
    assert batch.valid[first].tolist() == [1, 1, 1, 1]
    assert batch.rewards[first].tolist() == [5, 6, 7, 8]
    after = batch.next_observations["state"] * checker.norm.state_std + checker.norm.state_mean
    assert after[first, 1] == 9


@settings(max_examples=examples(30), deadline=None)
@given(
    sources=st.lists(
        st.lists(st.sampled_from([P, P, P, U, U, H, S, R]), min_size=1, max_size=24), min_size=1, max_size=4
    ),
    ends=st.lists(st.sampled_from(["success", "failure", "limit", "died"]), min_size=4, max_size=4),
    lengths=st.sampled_from([(1, 1, None), (4, 4, None), (6, 3, None), (2, 2, 7), (5, 2, 3)]),
    terminal=st.sampled_from(["keep", "drop"]),
    seed=st.integers(0, 2**16),
)
def test_whoever_acted_every_window_is_sampled(sources, ends, lengths, terminal, seed):
    cfg = config(
        *lengths, terminal_windows=terminal, demo_fraction="uniform",
        capacity=200, demo_capacity=200, human_capacity=50, image_capacity=200,
    )  # fmt: skip
    episodes = [
        Coded(i, len(s), end, np.array(s, np.uint8), EVERY, session=f"s{i % 2}")
        for i, (s, end) in enumerate(zip(sources, ends, strict=False))
    ]
    replay = build(cfg)
    feed(replay, episodes, np.random.default_rng(seed))
    check_all(replay, episodes, cfg, n=400)


@pytest.mark.parametrize("age", [0, 2])
def test_with_missing_frames_evictions_and_the_human_store(age):
    rng = np.random.default_rng(3)
    cfg = config(capacity=400, human_capacity=300, demo_fraction="uniform", max_image_age=age)
    episodes = [make(rng, i, session=f"s{i % 3}") for i in range(120)]
    replay = build(cfg)
    feed(replay, episodes, rng)
    assert replay.stats()["replay/kept_for_interventions"] > 10
    checker = Checker(episodes, cfg)
    for _ in range(5):
        checker.check(replay.sample(rng, 4_000))


def test_an_amended_episode():
    rng = np.random.default_rng(4)
    cfg = config(demo_fraction="uniform")
    episodes = [make(rng, i, every_frame=True) for i in range(30)]
    replay = build(cfg)
    feed(replay, episodes, rng)
    for e in episodes:
        e.terminated, e.outcome, e.last_reward = True, Outcome.SUCCESS, 16.0
        replay.insert(e.session, Amend(e.episode_id, Outcome.SUCCESS, "operator", True, 16.0))
    check_all(replay, episodes, cfg)


def test_an_actor_that_was_silent_and_came_back():
    cfg = config(4, 4, demo_fraction="uniform")
    e = episode("pppphuuhpppuuu", "success")
    replay = build(cfg)
    begin, *_, end = e.records(np.random.default_rng(0))
    replay.insert("s", begin)
    for first, past in ((0, 5), (5, 7), (7, 12), (12, 14)):  # the first silence lies before the human came
        replay.insert("s", StepBlock.from_steps(e.episode_id, [e.step(t) for t in range(first, past)]))
        replay.close_session("s")
    replay.insert("s", end)
    check_all(replay, [e], cfg)


def test_put_back_from_records_it_is_the_same():
    rng = np.random.default_rng(5)
    cfg = config(demo_fraction="uniform")
    episodes = [make(rng, i) for i in range(25)]
    first, second = build(cfg), build(cfg)
    records = [(e.session, r) for e in episodes for r in e.records(rng)]
    for session, record in records:
        first.insert(session, record)
    for session, episode_id in first.episodes():  # whole episodes in place of live blocks
        for record in read_held(first, session, episode_id):
            second.insert(session, record)
    a, b = (r.sample(np.random.default_rng(0), 500) for r in (first, second))
    np.testing.assert_array_equal(a.rewards, b.rewards)
    np.testing.assert_array_equal(a.valid, b.valid)
    np.testing.assert_array_equal(a.next_observations["state"], b.next_observations["state"])


@pytest.mark.parametrize(("hz", "excluded"), [(50.0, 3), (20.0, 1), (10.0, 1), (5.0, 0)])
def test_what_is_not_imitated_before_an_intervention_is_a_time(hz, excluded):
    cfg = config(1, 1, demo_fraction="uniform")  # 0.06 s
    e = episode("pppppuup", "success")
    replay = Replay(dataclasses.replace(SPEC, control_hz=hz), cfg, preprocess(cfg, ("a", "b")))
    feed(replay, [e], np.random.default_rng(0))
    batch = replay.sample(np.random.default_rng(0), 400)
    norm = normaliser(1)
    tick = (batch.observations["state"] * norm.state_std + norm.state_mean)[:, 1].round().astype(int)
    left_out = sorted({int(t) for t, w in zip(tick, batch.bc_weight[:, 0], strict=True) if w == 0})
    assert left_out == list(range(5 - excluded, 5))

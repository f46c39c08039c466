"""Who acts: an arm is tried until enough is known of it, and then acts as often as it has earned it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serl_chunk.actor.arms import EVERY, KNOWN, MEMORY, WINDOW, Arms, Counts, succeeded_alone
from serl_chunk.actor.stats import EpisodeSummary
from serl_chunk.types import BEST, ONE, Outcome


def session(rates: dict[str, float], *, seed: int = 0, episodes: int = 300) -> tuple[Arms, list[str]]:
    """The arms that are drawn where each succeeds at its rate."""
    arms, rng, drawn = Arms(seed), np.random.default_rng([seed, 1]), []
    arms.judged()
    for i in range(episodes):
        arm = arms.draw(critic_chooses=True).arm
        arms.add(arm, f"e{i}", bool(rng.random() < rates[arm]))
        drawn.append(arm)
    return arms, drawn


@given(
    results=st.lists(st.sampled_from([True, False, None]), min_size=1, max_size=400),
    judged_from=st.integers(0, 20),
    seed=st.integers(0, 2**31),
)
def test_what_holds_whatever_the_episodes_come_to(results, judged_from, seed):
    arms, other = Arms(seed), Arms(seed)
    tried: list[bool] = []
    for i, success in enumerate(results):
        if i == judged_from:
            arms.judged()
            other.judged()
        before = {arm: arms.counts(arm) for arm in (ONE, BEST)}
        drawn = arms.draw(critic_chooses=True)
        assert drawn == other.draw(critic_chooses=True)  # a seed and the results reproduce it
        counted = {arm: arms.counts(arm).episodes for arm in (ONE, BEST)}
        assert i >= judged_from or drawn.arm == ONE
        if drawn.tries:
            assert counted[drawn.arm] < KNOWN
            assert not any(tried[-EVERY + 1 :])  # never two of four in a row
        elif drawn.arm == BEST:
            assert counted[BEST] >= KNOWN
        tried.append(drawn.tries)
        if success is not None:
            arms.add(drawn.arm, f"e{i}", success)
            other.add(drawn.arm, f"e{i}", success)
        for arm in (ONE, BEST):
            counts = arms.counts(arm)
            assert counts.episodes <= WINDOW
            assert counts.episodes <= before[arm].episodes + (arm == drawn.arm)


@pytest.mark.parametrize(("one", "best"), [(0.8, 0.3), (0.3, 0.8), (0.95, 0.0), (0.0, 0.95)])
def test_the_better_arm_comes_to_act(one, best):
    better = ONE if one > best else BEST
    late = [session({ONE: one, BEST: best}, seed=seed)[1][100:] for seed in range(10)]
    share = np.mean([[arm == better for arm in drawn] for drawn in late])
    assert share > 0.85  # the other one is tried again where what is known of it is old


def test_a_critic_that_becomes_good_late_is_found_all_the_same():
    """Without forgetting, eight early failures would exclude it for ever."""
    arms, rng, drawn = Arms(0), np.random.default_rng(1), []
    arms.judged()
    for i in range(500):
        arm = arms.draw(critic_chooses=True).arm
        arms.add(arm, f"e{i}", bool(rng.random() < (0.6 if arm == ONE else 0.0 if i < 100 else 0.95)))
        drawn.append(arm)
    assert drawn[KNOWN * EVERY : MEMORY].count(BEST) < 20
    assert drawn[-100:].count(BEST) > 80


def test_until_eight_of_each_are_known_every_fourth_is_the_best():
    _, drawn = session({ONE: 1.0, BEST: 1.0}, episodes=KNOWN * EVERY)
    assert drawn == ([ONE] * (EVERY - 1) + [BEST]) * KNOWN


def test_no_arm_is_tried_where_another_trial_is_under_way():
    arms = Arms(0)
    arms.judged()
    assert {arms.draw(critic_chooses=True, may_try=False) for _ in range(20)} == {(ONE, False)}
    assert arms.draw(critic_chooses=False) == (ONE, False)


def test_only_the_newest_episodes_of_an_arm_count():
    arms, _ = session({ONE: 0.0, BEST: 0.0}, episodes=0)
    for i in range(WINDOW):
        arms.add(ONE, f"a{i}", False)
    for i in range(WINDOW // 2):
        arms.add(ONE, f"b{i}", True)
    assert arms.counts(ONE) == Counts(WINDOW // 2, WINDOW)
    arms.correct("b0", False)
    arms.correct("b1", None)
    arms.correct("another actor's", None)
    assert arms.counts(ONE) == Counts(WINDOW // 2 - 2, WINDOW - 1)


@pytest.mark.parametrize(
    ("outcome", "by", "segments", "counts"),
    [
        (Outcome.SUCCESS, "environment", 0, True),
        (Outcome.SUCCESS, "operator", 0, True),
        (Outcome.SUCCESS, "environment", 1, False),  # a helped one
        (Outcome.FAILURE, "operator", 0, False),
        (Outcome.UNKNOWN, "environment", 0, False),  # the time limit
        (Outcome.UNKNOWN, "fault", 0, False),
        (Outcome.UNKNOWN, "operator", 0, None),  # who stopped it said nothing
        (Outcome.UNKNOWN, "learner", 0, None),
        (Outcome.UNKNOWN, "crash", 0, None),
    ],
)
def test_what_an_episode_counts_as(outcome, by, segments, counts):
    assert succeeded_alone(EpisodeSummary(seed=0, outcome=outcome, ended_by=by, segments=segments)) is counts

"""The updates that recorded steps entitle to, and that neither side ever waits for the other for good."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from properties import examples

from serl_chunk.learner.schedule import RateLimiter

RATIOS = st.floats(0.01, 20).map(lambda x: round(x, 3))


def started(ratio, lag, steps, updates=0, owed=0.0) -> RateLimiter:
    limiter = RateLimiter(ratio, lag)
    limiter.start(steps, updates, owed)
    return limiter


def test_nothing_is_allowed_or_limited_before_the_start():
    for ratio in (1.0, None):
        limiter = RateLimiter(ratio, 10)
        assert not limiter.may_update(1_000, 1)
        assert (limiter.steps_allowed(1_000), limiter.owed(1_000), limiter.updates_allowed(1_000)) == (None,) * 3
        assert (limiter.steps_missing(5, 1), limiter.updates_due(5)) == (0, 0)


def test_updates_follow_the_steps_since_the_start_and_actors_run_ahead_by_the_lag():
    limiter = started(0.5, 10, 100)
    assert [limiter.may_update(*of) for of in ((101, 1), (102, 1), (103, 2), (104, 2))] == [False, True, False, True]
    assert [limiter.steps_allowed(n) for n in (100, 107, 110, 130)] == [10, 3, 0, 0]
    limiter.did_update(2)
    assert [limiter.may_update(n, 1) for n in (104, 106)] == [False, True]
    limiter.did_update(1)  # in all they account for 6 steps
    assert limiter.steps_allowed(110) == 6


def test_what_each_side_waits_for_in_numbers():
    limiter = started(0.25, 100, 1_000)
    assert [limiter.steps_missing(n, 1) for n in (1_000, 1_003, 1_004, 1_500)] == [4, 1, 0, 0]
    assert limiter.steps_missing(1_000, 78) == 312
    assert [limiter.updates_due(n) for n in (1_000, 1_003, 1_004, 1_100)] == [0, 0, 1, 25]
    limiter.did_update(20)
    assert [limiter.updates_due(n) for n in (1_000, 1_100)] == [0, 5]


def test_what_was_owed_is_owed_after_a_resume():
    limiter = started(0.25, 100, 100)
    limiter.did_update(10)
    owed = limiter.owed(203)
    resumed, faster = started(0.25, 100, 203, 10, owed), started(1.0, 100, 203, 10, owed)
    assert [resumed.updates_due(n) for n in (203, 204)] == [limiter.updates_due(n) for n in (203, 204)] == [15, 16]
    assert resumed.updates_allowed(204) == 26
    assert [faster.updates_due(n) for n in (203, 204)] == [16, 17]  # another ratio is one for new steps
    unowed = started(0.25, 100, 1_000, 50)
    assert [unowed.may_update(n, 1) for n in (1_003, 1_004)] == [False, True]
    assert unowed.steps_allowed(1_000) == 100


def test_without_a_ratio_no_side_waits_and_a_run_goes_on_with_one_and_back():
    free = started(None, 10, 100)
    for _ in range(3):
        assert free.may_update(100, 1_000)
        free.did_update(1_000)
    assert free.steps_allowed(100) is free.steps_allowed(9_999) is free.updates_allowed(9_999) is None
    for n in (100, 9_999):
        assert (free.steps_missing(n, 20), free.updates_due(n), free.owed(n)) == (0, 0, 0.0)
    limited = started(0.5, 10, 300, 5_000, free.owed(300))
    assert [limited.updates_due(n) for n in (300, 302)] == [0, 1]  # for new steps alone
    assert limited.steps_allowed(300) == 10
    again = started(None, 10, 302, 5_000, limited.owed(302))
    assert (again.may_update(302, 1), again.updates_due(302), again.owed(302)) == (True, 0, 0.0)


@settings(max_examples=examples(100), deadline=None)
@given(ratio=RATIOS, steps=st.integers(0, 10_000), done=st.integers(0, 1_000), count=st.integers(1, 30))
def test_the_numbers_agree_with_the_permission(ratio, steps, done, count):
    limiter, now = started(ratio, 10_000, 7), 7 + steps
    limiter.did_update(done)
    missing = limiter.steps_missing(now, count)
    assert limiter.may_update(now, count) == (missing == 0)
    assert limiter.may_update(now + missing + 1, count)  # one more than enough, whatever rounding does
    assert missing < 2 or not limiter.may_update(now + missing - 2, count)
    assert limiter.may_update(now, limiter.updates_due(now)) or limiter.updates_due(now) == 0


@settings(max_examples=examples(100), deadline=None)
@given(
    ratio=RATIOS,
    per_update=st.integers(1, 30),
    spare=st.integers(0, 3),
    base=st.integers(0, 10_000),
    resumed=st.integers(0, 1_000),
)
def test_one_side_may_always_go_on_and_the_ratio_holds(ratio, per_update, spare, base, resumed):
    lag = -int(-per_update / ratio // 1) + spare  # the least lag that the configuration accepts, and a little more
    limiter = started(ratio, lag, base)
    if resumed:
        limiter.start(base, resumed)
    steps, first, done = base, limiter.updates, 0
    for _ in range(200):
        if limiter.may_update(steps, per_update):
            limiter.did_update(per_update)
            done += per_update
            continue
        allowed = limiter.steps_allowed(steps)
        assert allowed is not None
        assert allowed > 0, "both sides wait for each other"
        steps += 1
    assert limiter.updates == first + done
    slack = 0.5 * ratio + 1e-3 if resumed else 1e-3  # a resume rounds to whole steps
    assert done <= (steps - base) * ratio + slack

"""Updates and steps keep step, also at the end and after a resume; phases, and what a checkpoint notes of them."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from properties import examples

from serl_chunk.config.experiment import LearnerConfig
from serl_chunk.learner.schedule import IDLE_S, NOTICE_S, Phase, RateLimiter, StepShares, TrainingSchedule
from serl_chunk.learner.trainers.pretraining import PIECE_BYTES, SCAN, updates_at_once
from serl_chunk.types import CameraSpec


class Steps:
    """An ingest that only counts."""

    def __init__(self, env_steps: int = 0, resumed_steps: int = 0) -> None:
        self.env_steps, self.resumed_steps = env_steps, resumed_steps

    @property
    def fresh_steps(self) -> int:
        return self.env_steps - self.resumed_steps


def schedule(ingest: Steps, **config) -> TrainingSchedule:
    settings = {"utd_ratio": 0.5, "max_lag_steps": 40, "training_starts": 20, "warmup_episodes": 2, **config}
    return TrainingSchedule(LearnerConfig(**settings), ingest)  # type: ignore[arg-type]


def test_nothing_is_limited_before_training_but_an_offline_phase_stops_the_actors():
    p = schedule(Steps(10))
    assert [p.steps_allowed(phase) for phase in (Phase.PRETRAIN, Phase.OFFLINE, Phase.WARMUP)] == [None, 0, None]
    assert (p.may_update, p.updates_due, p.limiter.owed(10)) == (False, 0, None)
    # The warm-up waits for steps after its episodes.
    p = schedule(Steps(5))
    assert [p.steps_missing(Phase.WARMUP, episodes) for episodes in (1, 2)] == [0, 15]


@pytest.mark.parametrize(
    ("before", "after", "keeps", "due", "allowed"),
    [(0.5, 0.5, True, 7, 40 - 15), (0.5, 0.5, False, 0, 40), (None, 0.5, True, 0, 40), (0.5, None, True, 0, None)],
)
def test_a_resume_goes_on_where_it_was_with_or_without_a_ratio(before, after, keeps, due, allowed):
    ingest = Steps(200)
    first = schedule(ingest, utd_ratio=before)
    first.begin(0)
    ingest.env_steps = 221
    for _ in range(3):
        first.did_update()
    second = schedule(Steps(221, resumed_steps=221), utd_ratio=after)
    # A checkpoint of before anything was owed notes none.
    second.resume(3, first.limiter.owed(221) if keeps else None)
    second.begin(3)  # of a warm-up that gathered what was lost: changes nothing
    assert (second.updates_due, second.may_update) == (due, due > 0 or after is None)
    assert second.steps_allowed(Phase.TRAIN) == allowed
    assert not (before and after and keeps) or first.steps_allowed(Phase.TRAIN) == allowed


def of(**settings) -> TrainingSchedule:
    return TrainingSchedule(LearnerConfig(**settings), SimpleNamespace(env_steps=500))  # type: ignore[arg-type]


@pytest.mark.parametrize(("saved", "changes", "expected"), [
    ("train", {}, Phase.WARMUP), ("train", {"offline_updates": 5, "online_updates": 3}, Phase.DONE),
    ("offline", {"missed": True}, Phase.OFFLINE), ("train", {"online_updates": 3, "missed": True}, Phase.TRAIN),
    ("done", {"online_updates": 3, "missed": True}, Phase.DONE),
])  # fmt: skip
def test_where_a_run_goes_on(saved, changes, expected):
    state = {"offline_updates": 10, "online_updates": 0, "missed": False} | changes
    assert of(offline_steps=10, max_steps=3).resumed_phase(saved, **state) is expected


@pytest.mark.parametrize(("size", "batch", "expected"), [(128, 256, 10), (480, 256, 1), (0, 256, SCAN)])
def test_large_images_come_in_smaller_pieces(size, batch, expected):
    assert updates_at_once(batch, [CameraSpec("top", size, size)] if size else []) == expected
    assert expected == 1 or 2 * expected * batch * size * size * 3 <= PIECE_BYTES


# -- the rate limiter -----------------------------------------------------------------------------------------------

RATIOS = st.floats(0.01, 20).map(lambda x: round(x, 3))


def started(ratio, lag, steps, updates=0, owed=0.0) -> RateLimiter:
    limiter = RateLimiter(ratio, lag)
    limiter.start(steps, updates, owed)
    return limiter


def test_updates_follow_the_steps_since_the_start_and_actors_run_ahead_by_the_lag():
    limiter = started(0.5, 10, 100)
    assert [limiter.may_update(*of) for of in ((101, 1), (102, 1), (103, 2), (104, 2))] == [False, True, False, True]
    assert [limiter.steps_allowed(n) for n in (100, 107, 110, 130)] == [10, 3, 0, 0]
    limiter.did_update(2)
    assert [limiter.may_update(n, 1) for n in (104, 106)] == [False, True]
    limiter.did_update(1)  # in all they account for 6 steps
    assert limiter.steps_allowed(110) == 6


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


# -- allowances of several sessions ---------------------------------------------------------------------------------

LAG = 24


class Run:
    """A learner's schedule with actors that record, deliver and wait by hand."""

    def __init__(self, *names: str, lag: int = LAG, online_steps: int | None = None) -> None:
        self.now = 100.0
        self.limiter = RateLimiter(1.0, lag)
        self.limiter.start(0)
        self.steps, self.online_steps = 0, online_steps
        self.recorded = dict.fromkeys(names, 0)
        self.arrived = dict.fromkeys(names, 0)
        self.shares = StepShares(self.left, 5.0, lambda: self.now, steps_of=self.arrived.__getitem__)

    def left(self) -> int:
        left = self.limiter.steps_allowed(self.steps)
        assert left is not None
        return left if self.online_steps is None else min(left, self.online_steps - self.steps)

    def ask(self, name: str) -> int:
        allowed = self.shares.allowed(name)
        assert allowed is not None
        return allowed

    def record(self, name: str, most: int = 1) -> int:
        """Record and deliver up to `most` steps; returns how many."""
        n = max(0, min(most, self.ask(name) - self.recorded[name]))
        self.recorded[name] += n
        self.deliver(name)
        return n

    def deliver(self, name: str) -> None:
        n = self.recorded[name] - self.arrived[name]
        self.steps += n
        self.shares.delivered(name, n)
        self.arrived[name] += n

    def update(self) -> None:
        if self.limiter.may_update(min(self.steps, self.online_steps or self.steps), 1):
            self.limiter.did_update(1)

    @property
    def ahead(self) -> int:
        return sum(self.recorded.values()) - self.limiter.updates


@pytest.mark.parametrize("online_steps", [None, 301])
@pytest.mark.parametrize("n", [1, 12])
def test_the_sum_of_all_sessions_stays_within_one_lag(n, online_steps):
    names = [f"s{i}" for i in range(n)]
    run, rng = Run(*names, online_steps=online_steps), random.Random(n)
    for _ in range(4000):
        run.now += 0.001
        name = rng.choice(names)
        run.recorded[name] += min(rng.randrange(4), max(0, run.ask(name) - run.recorded[name]))
        if rng.random() < 0.5:
            run.deliver(rng.choice(names))
        if rng.random() < 0.7:
            run.update()
        assert run.ahead <= LAG
        assert online_steps is None or sum(run.recorded.values()) <= online_steps
    for name in names:
        run.deliver(name)
    if online_steps is not None:
        assert run.steps == online_steps
    if online_steps is None:
        assert min(run.recorded.values()) > run.steps / n / 2


def test_a_fast_session_does_not_starve_the_others():
    run = Run("fast", "slow", "other", lag=2)
    for _ in range(300):
        run.now += 0.01
        for _ in range(5):
            run.record("fast")
        for name in ("slow", "other"):
            run.record(name)
        run.update()
    assert min(run.recorded.values()) > run.steps / 4


def test_a_session_that_is_silent_gives_back_what_it_has_not_used():
    run = Run("a", "b")
    assert (run.ask("a"), run.ask("b")) == (LAG, 0)
    for _ in range(60):  # `a` is not asked for: it is not live
        run.now += 0.1
        run.ask("b")
    assert run.ask("b") == LAG
    assert run.ask("a") == 0  # should it come back


def test_sessions_that_are_away_are_forgotten_and_go_on_where_they_were():
    """Each process of an actor is a session: what is kept of them must not grow with the run."""
    names = [f"s{i}" for i in range(50)]
    run, sizes = Run(*names), []
    for total in (3, 6):
        for i, name in enumerate(names):
            run.now += 5.1 if i % 2 else 0.1
            run.record(name, 3)
            assert run.recorded[name] == total
            for _ in range(3):
                run.update()
            if i % 2:  # the others fall silent
                run.shares.closed(name)
            sizes.append(len(run.shares._shares))
    assert max(sizes) <= 3
    assert run.ahead <= LAG


def test_a_session_that_records_nothing_gives_back_what_it_holds():
    """An update needs every step there is: it would never come while one of them is held."""
    run = Run("idle", "busy", lag=LAG)
    assert run.ask("idle") == LAG
    for _ in range(round(4 * (IDLE_S + NOTICE_S) / 0.1)):
        run.now += 0.1
        run.ask("idle")
        run.record("busy", LAG)
        assert run.ahead <= LAG
    assert run.recorded["busy"] == LAG
    assert run.ask("idle") == 0
    for _ in range(60):  # it goes on where it wants to
        run.now += 0.1
        run.record("busy")
        run.record("idle")
        run.update()
    assert run.recorded["idle"] > 10


def test_no_limit_is_no_limit():
    shares = StepShares(lambda: None, 5.0, steps_of=lambda session: 0)
    assert (shares.allowed("a"), shares.allowed("b")) == (None, None)

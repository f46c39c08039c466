"""Allowances of several sessions stay together within what the schedule allows, and no session is left without."""

from __future__ import annotations

import contextlib
import random
import threading
import time

import pytest
from ports import free_port
from transport_tools import CONFIG, linked, serving, step

from serl_chunk.learner.schedule import IDLE_S, NOTICE_S, RateLimiter, StepShares
from serl_chunk.types import Begin, StepBlock

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
@pytest.mark.parametrize("n", [1, 3, 12, 40])
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


def test_a_session_that_closes_gives_back_what_it_has_not_used():
    run = Run("a", "b")
    assert (run.ask("a"), run.ask("b")) == (LAG, 0)
    run.shares.closed("a")
    assert run.ask("b") == LAG


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


@pytest.mark.parametrize("sessions", [3, 12])
def test_lockstep_actors_of_a_learner_share_one_lag(sessions):
    """Real sockets. Each actor goes on as fast as it is let, and the learner updates as often as the steps allow."""
    online_steps, lock = 600, threading.Lock()
    limiter = RateLimiter(1.0, LAG)
    limiter.start(0)
    steps, recorded = [0], [0]

    def left():
        return min(limiter.steps_allowed(steps[0]), online_steps - steps[0])

    shares = StepShares(left, CONFIG.timeout_s, steps_of=lambda session: 0)

    def on_record(info, record):
        if isinstance(record, StepBlock):
            steps[0] += record.n
            shares.delivered(info.session, record.n)

    port, over, ahead = free_port(), threading.Event(), [0]
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(
            serving(
                port, on_record=on_record, allowance=shares.allowed, on_silent=lambda i, gone: shares.closed(i.session)
            )
        )
        began = time.monotonic()
        links = [stack.enter_context(linked(port, actor_id=str(i))) for i in range(sessions)]

        def act(link):
            link.begin(Begin("e"))
            tick = 0
            while not over.is_set():
                if link.steps_recorded < link.allowance:
                    with lock:
                        link.step(step(tick))
                        recorded[0] += 1
                        ahead.append(recorded[0] - limiter.updates)
                    tick += 1
                else:
                    time.sleep(0.001)

        actors = [threading.Thread(target=act, args=(link,)) for link in links]
        for actor in actors:
            actor.start()
        try:
            end = time.monotonic() + 30
            while limiter.updates < online_steps and time.monotonic() < end:
                if limiter.may_update(steps[0], 1):
                    limiter.did_update(1)
                    server.push_allowances()
                time.sleep(0.002)
            time.sleep(0.1)
        finally:
            over.set()
            for actor in actors:
                actor.join()
        assert recorded[0] == steps[0] == online_steps == limiter.updates
        assert max(ahead) <= LAG
        statuses = server.stats()["statuses"]  # those that answer heartbeats included
        beats = sessions * ((time.monotonic() - began) / CONFIG.heartbeat + 1)
        assert statuses < 1.5 * online_steps + beats

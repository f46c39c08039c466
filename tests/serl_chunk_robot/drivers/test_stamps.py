"""Stamps of another clock become moments of the loop's clock, whatever is between the two."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serl_chunk_robot.drivers.stamps import StampedDriver, StampMap

HOUR = 3600.0


class StillDriver(StampedDriver):
    """Its states are told."""

    def __init__(self):
        self._clock = lambda: self.now

    def read(self):
        return SimpleNamespace(stamp=self.stamp)

    def answers(self, level, now, stamp):
        self.now, self.stamp = now, stamp
        return self.stop("a test", level)


@given(
    apart=st.floats(-1e7, 1e7),
    drift=st.floats(-200e-6, 200e-6),
    seed=st.integers(0, 1000),
    slowest=st.floats(0.0, 0.05),
)
def test_clocks_apart_and_drifting_agree_to_two_milliseconds(apart, drift, seed, slowest):
    """Messages at 100 Hz; at least one in half a second has a transit of 0.2 ms."""
    stamps, worst = StampMap(), 0.0
    for k, delay in enumerate(np.random.default_rng(seed).uniform(0.0, slowest, 1000)):
        moment = 0.01 * k
        arrival = moment + (2e-4 if k % 50 == 0 else delay)
        mapped = stamps.moment(apart + moment * (1 + drift), arrival)
        assert mapped <= arrival + 1e-6
        worst = max(worst, abs(mapped - moment))
    assert worst < 0.002


def test_a_delayed_message_is_as_old_as_it_is_and_a_repeated_one_gets_older():
    stamps = StampMap()
    for k in range(100):
        assert stamps.moment(HOUR + 0.01 * k, 0.01 * k) == pytest.approx(0.01 * k)
    assert stamps.moment(HOUR + 1.0, 1.3) == pytest.approx(1.0)
    moments = [stamps.moment(HOUR + 1.0, now) for now in np.arange(1.3, 20.0, 0.01)]
    assert moments[100] == pytest.approx(1.0)


def test_a_repeated_stamp_is_old_for_long_enough_to_stop_a_robot():
    stamps = StampMap()
    ages = [now - stamps.moment(HOUR, now) for now in np.arange(0.0, 2.4, 0.01)]
    np.testing.assert_allclose(ages, np.arange(0.0, 2.4, 0.01), atol=1e-6)


def test_a_clock_that_is_set_is_believed_again_after_five_seconds():
    stamps = StampMap()
    for now in np.arange(0.0, 10.0, 0.01):
        stamps.moment(HOUR + now, now)
    late = [now - stamps.moment(now, now) for now in np.arange(10.0, 16.0, 0.01)]  # set back by an hour
    assert late[0] == pytest.approx(HOUR)
    assert max(late[-50:]) < 1e-6
    assert 17.0 - stamps.moment(2 * HOUR, 17.0) == pytest.approx(0.0)  # set on


def test_a_stop_is_answered_by_a_state_that_is_newer_than_its_first_report():
    stop = StillDriver()
    assert not stop.answers(0, 10.0, 9.99)
    assert not stop.answers(0, 10.1, 10.0), "as old as the stop"
    assert stop.answers(0, 10.2, 10.01)
    assert not stop.answers(0, 10.3, 10.01), "the next stop needs a state of its own"


def test_each_level_of_a_stop_needs_a_state_of_its_own():
    stop = StillDriver()
    assert not stop.answers(0, 10.0, 9.99)
    assert not stop.answers(1, 10.1, 10.05)
    assert stop.answers(1, 10.2, 10.15)

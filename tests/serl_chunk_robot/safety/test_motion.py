"""Braking ends, keeps its limits, and travels no further than its bound."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from properties import examples

from serl_chunk_robot.safety.motion import Rates, SetPoint, braked, peak_speed, stopping_distance

N = 400  # joints, each with limits and a state of its own
CLOSE = 1 + 1e-6


def states(seed: int, dt: float) -> tuple[Rates, SetPoint]:
    """Limits from a stiff gripper's to a first day's, and states within them: many near rest, at a turn, at a limit."""
    rng = np.random.default_rng(seed)
    velocity = 10 ** rng.uniform(-1, 1.2, N)
    acceleration = velocity * 10 ** rng.uniform(0, 3.5, N)
    rates = Rates(velocity, acceleration, acceleration * 10 ** rng.uniform(0.5, 4, N))
    share = rng.choice([-1.0, 1.0], (2, N)) * np.where(
        rng.random((2, N)) < 0.4, 10 ** rng.uniform(-6, 0, (2, N)), rng.random((2, N))
    )
    share[:, rng.random(N) < 0.1] = 0
    share[1, rng.random(N) < 0.2] = 0
    share[0, rng.random(N) < 0.1] = 1
    return rates, SetPoint(np.zeros(N), share[0] * velocity, share[1] * acceleration)


@pytest.mark.parametrize("dt", [0.002, 0.005, 0.02])
@settings(max_examples=examples(20))
@given(seed=st.integers(0, 2**32 - 1))
def test_braking_stands_in_time_within_every_limit_and_its_distance(dt: float, seed: int):
    rates, at = states(seed, dt)
    start = at
    speed = np.abs(start.velocity)
    turn = np.abs(start.acceleration) / rates.jerk
    longest = speed / rates.acceleration + 2 * turn + rates.acceleration / rates.jerk + 8 * dt
    longest += 4 * np.sqrt((speed + turn * np.abs(start.acceleration)) / rates.jerk)
    up = stopping_distance(start.velocity, start.acceleration, rates, dt)
    down = stopping_distance(-start.velocity, -start.acceleration, rates, dt)
    peak = [peak_speed(s * start.velocity, s * start.acceleration, rates, dt) for s in (1, -1)]
    fastest = np.maximum(speed, np.maximum(*peak)) * CLOSE + 1e-9
    took = np.zeros(N)
    for _ in range(int(longest.max() / dt) + 1):
        after = braked(at, rates, dt)
        assert (np.abs(after.acceleration) <= np.maximum(rates.acceleration, np.abs(start.acceleration)) * CLOSE).all()
        rounding = 1e-15 * (1 + np.abs(after.position)) / dt**3
        assert (np.abs(after.acceleration - at.acceleration) / dt <= rates.jerk * CLOSE + rounding).all()
        assert (np.abs(after.velocity) <= fastest).all()
        assert (after.position <= up * CLOSE + 1e-12).all()
        assert (-after.position <= down * CLOSE + 1e-12).all()
        took += dt * ((after.velocity != 0) | (after.acceleration != 0))
        at = after
    assert at.stands
    assert (took <= longest).all()
    assert np.array_equal(braked(at, rates, dt).position, at.position), "what stands stays"


@settings(max_examples=examples(20))
@given(seed=st.integers(0, 2**32 - 1), dt=st.sampled_from([0.002, 0.005, 0.02]))
def test_the_bound_is_of_use(seed: int, dt: float):
    """A joint at full speed is given no more than 3 passes and half as much again as it needs."""
    rates, _ = states(seed, dt)
    start = SetPoint(np.zeros(N), rates.velocity.copy(), np.zeros(N))
    at = start
    while not at.stands:
        at = braked(at, rates, dt)
    bound = stopping_distance(start.velocity, start.acceleration, rates, dt)
    assert (bound <= 1.5 * at.position + 3 * rates.velocity * dt).all()


@settings(max_examples=examples(20))
@given(seed=st.integers(0, 2**32 - 1), dt=st.sampled_from([0.002, 0.005, 0.02]), validity=st.floats(0.08, 0.3))
def test_a_lapse_travels_no_further_than_validity_and_braking(seed: int, dt: float, validity: float):
    rates, start = states(seed, dt)
    start = SetPoint(start.position, start.velocity, np.zeros(N))
    at = start
    passes = int(validity / dt)
    for _ in range(passes):  # the last command still counts: the set point goes on at its speed
        at = SetPoint(at.position + start.velocity * dt, start.velocity, np.zeros(N))
    while not at.stands:
        at = braked(at, rates, dt)
    bound = stopping_distance(np.abs(start.velocity), np.zeros(N), rates, dt)
    assert (np.abs(at.position) <= np.abs(start.velocity) * validity + bound + 1e-12).all()


def test_a_jerk_that_outweighs_the_acceleration_does_not_end_braking_beyond_it():
    """A gripper of 1e7 jerk at 50 Hz: what counts as rest is measured against the smaller of the two limits."""
    rates = Rates(np.array([3.0]), np.array([0.3]), np.array([1e7]))
    at = SetPoint(np.zeros(1), np.array([0.009]), np.zeros(1))
    while not at.stands:
        at = braked(at, rates, 0.02)
        assert abs(at.acceleration[0]) <= 0.3 * CLOSE


def test_a_set_point_keeps_its_differences_and_a_joint_that_turns_round_does_not_stand():
    at = SetPoint.standing(np.array([1.0, 2.0])).to(np.array([1.1, 2.0]), 0.1)
    assert at.velocity == pytest.approx([1.0, 0.0])
    assert at.acceleration == pytest.approx([10.0, 0.0])
    assert SetPoint.standing(np.zeros(2)).stands
    assert not SetPoint(np.zeros(2), np.zeros(2), np.array([0.0, -5.0])).stands

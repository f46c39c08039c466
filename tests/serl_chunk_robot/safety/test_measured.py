"""Which samples of the measured state are believed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from robot_limits import HIGH, HOME, LOW, J

from serl_chunk_robot.safety.measured import Measured, Sample

V, DT = 3.2, 0.005
ZERO = np.zeros(J)


def sample(q: np.ndarray, stamp: float) -> Sample:
    """A reading whose efforts differ each time, as a real sensor's."""
    return Sample(np.array(q, np.float64), ZERO.copy(), np.full(J, stamp), stamp)


def judge(low: np.ndarray = LOW, high: np.ndarray = HIGH) -> Measured:
    return Measured(low, high, np.full(J, V))


def begun() -> Measured:
    measured = judge()
    assert measured.judge(sample(HOME, 0.0), 0.0, HOME)
    return measured


@pytest.mark.parametrize("name", ["q", "dq", "effort"])
@pytest.mark.parametrize(
    "values",
    [np.full(J, np.nan), np.full(J, np.inf), np.zeros(J - 1), np.zeros((1, J)), np.zeros(J, int), np.full(J, None)],
)
def test_what_is_no_finite_vector_is_doubtful(name: str, values: np.ndarray):
    measured = begun()
    assert not measured.judge(sample(HOME, DT)._replace(**{name: values}), DT, HOME)
    assert name in measured.reason
    assert measured.good is not None
    assert measured.good.stamp == 0.0
    assert not begun().judge(Sample(HOME, ZERO, ZERO, np.nan), DT, HOME), "a stamp that is no number"
    for beyond in (LOW - 1e-3, HIGH + 1e-3):
        measured = begun()
        assert not measured.judge(sample(np.where(np.arange(J) == 8, beyond, HOME), DT), DT, HOME)
        assert "joint 8 reads" in measured.reason, "what the mechanism cannot reach"


def test_two_doubtful_in_a_row_are_lost_and_one_is_not():
    measured, bad = begun(), HOME + 1.0
    for k in range(1, 7):
        believed = measured.judge(sample(bad if k % 2 else HOME, k * DT), k * DT, HOME)
        assert believed == (k % 2 == 0)
        assert not measured.lost
    assert not measured.judge(sample(bad, 7 * DT), 7 * DT, HOME)
    assert not measured.judge(sample(bad, 8 * DT), 8 * DT, HOME)
    assert measured.lost


@pytest.mark.parametrize(("factor", "believed"), [(1.4, True), (1.6, False)])
def test_a_joint_may_move_at_one_and_a_half_times_its_speed(factor: float, believed: bool):
    measured, q = begun(), HOME.copy()
    q[3] += factor * V * DT
    assert measured.judge(sample(q, DT), DT, HOME) == believed


@pytest.mark.parametrize(("age", "believed"), [(0.09, True), (0.11, False), (-0.09, True), (-0.11, False)])
def test_a_sample_older_than_100_ms_is_stale(age: float, believed: bool):
    measured = judge()
    assert measured.judge(sample(HOME, 1.0), 1.0 + age, HOME) == believed


def test_a_stale_first_sample_that_repeats_with_a_new_stamp():
    measured = judge()
    old = Sample(HOME, ZERO, ZERO, 0.0)
    assert not measured.judge(old, 0.5, HOME)
    assert measured.judge(old._replace(stamp=0.505), 0.505, HOME)


@given(limits=st.sampled_from([1.0, 10.0]), good=st.integers(0, 3))
def test_a_failed_read_of_minus_pi_is_never_believed(limits: float, good: int):
    """Interbotix's node publishes -pi for all joints, for as long as reads fail."""
    wide = limits > 1
    measured = judge(limits * LOW - wide, limits * HIGH + wide)
    for k in range(good + wide):  # without limits to tell, one good sample is needed
        assert measured.judge(sample(HOME, k * DT), k * DT, HOME)
    for k in range(4, 1000):
        assert not measured.judge(sample(np.full(J, -np.pi), k * DT), k * DT, HOME)
    assert measured.lost
    assert measured.good is None or np.array_equal(measured.good.q, HOME)


def test_a_stamp_that_stands_still_hides_no_jump():
    measured = begun()
    assert not measured.judge(sample(HOME + 0.5, 0.0)._replace(effort=ZERO), DT, HOME)
    assert measured.judge(sample(HOME + 0.01, 0.0)._replace(effort=ZERO), DT, HOME), "one arm was read anew"
    for k in range(2, 30):
        believed = measured.judge(sample(HOME + 0.01 + 1e-4 * k, 0.0), k * DT, HOME)
        assert believed == (k * DT <= 0.1), "it is stale in the end"


def test_a_frozen_reading_is_stale_once_the_target_has_moved():
    """HIL-SERL's getstate has no stamp and repeats for ever."""
    measured, frozen = judge(), Sample(HOME, ZERO, ZERO, 0.0)
    for k in range(60):
        now = k * DT
        believed = measured.judge(frozen._replace(stamp=now), now, HOME + 0.3 * now)
        assert believed == (now < 0.1)
    stands = judge()
    for k in range(200):  # a robot that stands may read the same for ever
        assert stands.judge(frozen._replace(stamp=k * DT), k * DT, HOME + 0.015 * np.sin(k))


def test_a_reading_that_froze_during_doubt_is_noticed_after_it():
    measured, frozen = begun(), Sample(HOME, ZERO, ZERO, 0.0)
    for k in range(1, 60):
        measured.judge(frozen._replace(stamp=k * DT - 0.2 * (k < 10)), k * DT, HOME + 0.01 * k)
    assert "repeated" in measured.reason


def test_it_begins_anew_after_forget():
    measured, elsewhere = begun(), HOME + 0.9 * (HIGH - HOME)
    for k in range(1, 400):
        assert not measured.judge(sample(elsewhere, k * DT), k * DT, HOME)
    assert measured.lost
    measured.forget()
    assert measured.good is None
    assert not measured.lost
    assert measured.judge(sample(elsewhere, 2.0), 2.0, HOME)
    assert measured.reason == ""


@given(seed=st.integers(0, 2**32 - 1))
def test_an_arm_that_follows_its_limits_is_always_believed(seed: int):
    rng = np.random.default_rng(seed)
    measured, q, now = judge(), HOME.copy(), 0.0
    for _ in range(200):
        q = np.clip(q + rng.uniform(-V, V, J) * DT, LOW, HIGH)
        now += DT
        assert measured.judge(sample(q, now - rng.uniform(0, 0.5 * DT)), now, q), measured.reason

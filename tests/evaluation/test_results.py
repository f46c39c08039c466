"""Intervals of rates and of differences of rates."""

from __future__ import annotations

import numpy as np
import pytest

from serl_chunk.evaluation.results import paired_difference, wilson_interval


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [(97, 100, 0.9155, 0.9897), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (50, 100, 0.4038, 0.5962)],
)
def test_wilson_interval(successes, n, low, high):
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=6e-5)


def test_an_interval_without_episodes_says_nothing():
    assert wilson_interval(0, 0) == (0.0, 1.0)


def pairs(both: int, first: int, second: int, neither: int) -> tuple[np.ndarray, np.ndarray]:
    table = ((both, 1, 1), (first, 1, 0), (second, 0, 1), (neither, 0, 0))
    return tuple(np.concatenate([np.full(n, values[k], bool) for n, *values in table]) for k in (0, 1))


def test_the_paired_interval_holds_the_difference_in_95_of_100_cases():
    rng, held, n = np.random.default_rng(0), 0, 100
    for _ in range(400):
        luck = rng.random((2, n))
        first = luck[0] < 0.95
        second = np.where(rng.random(n) < 0.5, luck[0], luck[1]) < 0.88
        difference, low, high = paired_difference(first, second)
        assert difference == pytest.approx(second.mean() - first.mean())
        assert low <= difference <= high
        held += low <= -0.07 <= high
    assert 0.92 * 400 <= held <= 0.99 * 400
    assert paired_difference(second, first) == pytest.approx((-difference, -high, -low))


def test_pairs_that_agree_leave_a_narrow_interval():
    _, low, high = paired_difference(*pairs(90, 0, 0, 10))
    _, apart_low, apart_high = paired_difference(*pairs(81, 9, 9, 1))
    assert high - low < 0.4 * (apart_high - apart_low)
    assert -0.1 < low <= 0 <= high < 0.1


def test_the_interval_of_a_table_of_newcombe():
    """Published: 0.2000 (0.0569, 0.3404)."""
    assert paired_difference(*pairs(36, 2, 12, 0)) == pytest.approx((0.2, 0.0569, 0.3404), abs=6e-5)

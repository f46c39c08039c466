"""A comparison that ends once it is decided: its false verdicts, and its interval."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serl_chunk.evaluation.comparison import ERROR, Pairs

COUNTS = st.builds(Pairs, *[st.integers(0, 60)] * 3)


def test_a_fair_coin_seldom_decides_however_often_it_is_looked_at():
    """Exact, over all sequences of 300 pairs of which one episode succeeded."""
    alive, decided = {(0, 0): 1.0}, 0.0
    for _ in range(300):
        after: dict[tuple[int, int], float] = {}
        for (second, first), p in alive.items():
            for key in ((second + 1, first), (second, first + 1)):
                after[key] = after.get(key, 0.0) + p / 2
        ended = {key for key in after if Pairs(*key, 0).decided}
        decided += sum(after[key] for key in ended)
        alive = {key: p for key, p in after.items() if key not in ended}
    assert 0.02 < decided <= ERROR


@given(COUNTS, st.floats(0, 1), st.floats(0, 1))
def test_the_capital_is_a_martingale_under_its_mean(pairs, share, split):
    second, first = share * split, share * (1 - split)
    mean = min(max(second - first, -0.99), 0.99)
    second = mean + first
    chances = (second, first, 1 - second - first)
    if min(chances) < 0:
        return
    added = [pairs._replace(**{name: getattr(pairs, name) + 1}) for name in Pairs._fields]
    expected = sum(p * float(after.capital(mean)) for p, after in zip(chances, added, strict=True))
    assert expected == pytest.approx(float(pairs.capital(mean)), rel=1e-9)


@given(COUNTS)
def test_the_interval_holds_what_was_measured_and_no_zero_once_it_is_decided(pairs):
    low, high = pairs.interval
    assert -1 <= low <= pairs.difference <= high <= 1
    assert pairs.decided <= (low >= 0 or high <= 0)
    swapped = Pairs(pairs.first_alone, pairs.second_alone, pairs.ties)
    assert swapped.interval == pytest.approx((-high, -low))
    assert swapped.decided == pairs.decided


def test_pairs_are_counted_by_who_succeeded():
    first, second = np.array([[1, 1, 0, 0, 0], [1, 0, 1, 1, 0]], bool)
    assert Pairs.of(first, second) == (2, 1, 2)
    assert Pairs(0, 0, 0).interval == (-1, 1)
    assert [Pairs(n, 0, 9).decided for n in (7, 8)] == [False, True]

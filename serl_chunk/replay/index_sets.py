"""Sets of storage rows that a sampler draws from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Windows(Protocol):
    """Windows that a half of a batch is drawn from."""

    def __len__(self) -> int: ...

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Draw with replacement: storage rows of windows' starts, int64[shape], or of all their steps."""


class IndexSet:
    """A set of integers in `0 <= row < capacity` that adds, removes and draws without a Python loop.

    Members lie densely in one array, so that a draw is one lookup; a removal moves the members at the array's end
    into the holes. Their order is therefore arbitrary, but depends on the sequence of calls alone.
    """

    def __init__(self, capacity: int) -> None:
        self._members = np.empty(capacity, np.int64)
        self._position = np.zeros(capacity, np.int64)  # place in `_members` plus 1; 0: absent (zeros cost no pages)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        return self._members.nbytes + self._position.nbytes

    @property
    def rows(self) -> np.ndarray:
        return self._members[: self._count].copy()

    def contains(self, rows: np.ndarray) -> np.ndarray:
        """Which of `rows` int64[K] are members, bool[K]."""
        return self._position[rows] > 0

    def add(self, rows: np.ndarray) -> None:
        """Insert distinct `rows` int64[K]; members already present stay."""
        new = rows[self._position[rows] == 0]
        end = self._count + len(new)
        self._members[self._count : end] = new
        self._position[new] = np.arange(self._count + 1, end + 1)
        self._count = end

    def discard(self, rows: np.ndarray) -> None:
        """Remove distinct `rows` int64[K]; absent ones are ignored."""
        gone = rows[self._position[rows] > 0]
        end = self._count - len(gone)
        holes = self._position[gone] - 1
        holes = holes[holes < end]  # holes past the new end need no filling
        self._position[gone] = 0
        tail = self._members[end : self._count]
        movers = tail[self._position[tail] > 0]
        self._members[holes] = movers
        self._position[movers] = holes + 1
        self._count = end

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return self._members[rng.integers(self._count, size=shape)]


class StratifiedSampler:
    """Draws from `view` such that of the members in one of two `sides` a share of `share` is of the first.

    Members of neither keep their share. Where one of the sides is empty the draw is uniform.
    """

    def __init__(self, view: IndexSet, sides: Sequence[IndexSet], share: float) -> None:
        self._view, (self._positive, self._negative), self._share = view, sides, share

    def __len__(self) -> int:
        return len(self._view)

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        rows = self._view.draw(rng, shape)
        if not len(self._positive) or not len(self._negative):
            return rows
        sided = self._positive.contains(rows) | self._negative.contains(rows)
        good = rng.random(shape) < self._share
        for side, chosen in ((self._positive, sided & good), (self._negative, sided & ~good)):
            rows[chosen] = side.draw(rng, (int(chosen.sum()),)) if chosen.any() else rows[chosen]
        return rows

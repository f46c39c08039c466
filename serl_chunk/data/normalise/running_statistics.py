"""Statistics of streams of vectors: moments by merging, and quantiles that are exact in bounded memory.

Quantiles are those of numpy's default: the order statistics around rank `q * (n - 1)`, linearly interpolated. Up to
`keep` values are held and sorted in the end. Of more values, a histogram over the upper 16 of a float32's 32 bits is
kept for each dimension (65,536 counts; 2.5 MB with those of the second pass). Bit patterns order as the numbers do, so
the bin of an order statistic is known exactly, and

- after one pass the middle of that bin is returned, wrong by at most 2**-8 (0.4 %) of the order statistic's size
  (2**-134 where it is smaller than 2**-126);
- after a second pass over the same values, which counts the lower 16 bits inside these few bins, it is exact.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from serl_chunk.types import DataError

KEEP = 20_000_000  # values held for exact quantiles: 80 MB as float32
RELATIVE_ERROR = 2.0**-8  # of an order statistic after one pass over more values than are kept
_BINS = 1 << 16
_FLUSH = 1 << 20  # values counted at once: a histogram of many bins must not be made for every few rows


@dataclasses.dataclass
class Moments:
    """Count, mean, sum of squared differences from it, and extremes of vectors float[N, D]; all float64[D].

    Blocks are merged as Chan, Golub and LeVeque (1979) do, so that neither order nor length loses digits.
    """

    count: int
    mean: np.ndarray
    m2: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @classmethod
    def empty(cls, dim: int) -> Moments:
        return cls(0, np.zeros(dim), np.zeros(dim), np.full(dim, np.inf), np.full(dim, -np.inf))

    @classmethod
    def of(cls, values: np.ndarray) -> Moments:
        if not len(values):
            return cls.empty(values.shape[1])
        mean = values.mean(0, dtype=np.float64)
        m2 = np.square(values - mean).sum(0)
        return cls(len(values), mean, m2, values.min(0).astype(np.float64), values.max(0).astype(np.float64))

    def merged(self, other: Moments) -> Moments:
        count = self.count + other.count
        if not count:
            return self
        delta = other.mean - self.mean
        return Moments(
            count,
            self.mean + delta * (other.count / count),
            self.m2 + other.m2 + delta**2 * (self.count * (other.count / count)),
            np.minimum(self.low, other.low),
            np.maximum(self.high, other.high),
        )

    @property
    def std(self) -> np.ndarray:
        """Standard deviation of the population: divided by N."""
        return np.sqrt(self.m2 / max(self.count, 1))


class Statistics:
    """Moments and quantiles of a stream of vectors of `dim` values, taken as float32; `keep` of these may be held.

    Call `add` with all values. If `unsettled` is then True, call `refine` with the same values again, in any order and
    any blocks, for exact quantiles; the module's text has the error without.
    """

    def __init__(self, dim: int, quantiles: Sequence[float] = (0.01, 0.99), keep: int = KEEP) -> None:
        self.moments = Moments.empty(dim)
        self._dim, self._quantiles, self._keep = dim, tuple(quantiles), keep
        self._held: list[np.ndarray] = []
        self._n_held = 0
        self._counts: np.ndarray | None = None  # int64[D, 65536] once there are more values than may be held
        self._refined: dict[tuple[int, int], np.ndarray] = {}  # (dimension, bin) -> counts of the lower 16 bits

    @property
    def unsettled(self) -> bool:
        """Exact quantiles need a second pass."""
        return self._counts is not None and not self._refined

    def add(self, values: np.ndarray) -> None:
        """Add rows float[N, D]. Raises DataError where one is not finite or has another length."""
        values = self._checked(values)
        self.moments = self.moments.merged(Moments.of(values))
        self._held.append(values.copy())  # the caller may reuse its buffer
        self._n_held += values.size
        if self._n_held > (self._keep if self._counts is None else min(self._keep, _FLUSH)):
            self._flush()

    def refine(self, values: np.ndarray) -> None:
        """Count the same rows in a second pass. Raises DataError as `add` does."""
        self._flush()
        if not self._refined:
            assert self._counts is not None
            for d in range(self._dim):
                for k in {self._bin_of(d, r) for r in self._all_ranks()}:
                    self._refined[d, k] = np.zeros(_BINS, np.int64)
        upper, lower = _halves(self._checked(values))
        for (d, k), counts in self._refined.items():
            counts += np.bincount(lower[upper[:, d] == k, d], minlength=_BINS)

    def quantile(self) -> np.ndarray:
        """Return float64[Q, D]. Raises DataError of no vectors, and where the second pass had other values."""
        if not self.moments.count:
            raise DataError("statistics: there is no step")
        if self._counts is None:
            values = np.concatenate(self._held)
            ranks = self._all_ranks()
            ordered = np.empty((len(ranks), self._dim))
            for d in range(self._dim):  # one copy of a column at a time
                ordered[:, d] = np.partition(values[:, d], ranks)[ranks]
            at = {(d, r): ordered[i, d] for i, r in enumerate(ranks) for d in range(self._dim)}
        else:
            self._flush()
            at = {(d, r): self._order_statistic(d, r) for r in self._all_ranks() for d in range(self._dim)}
        out = np.empty((len(self._quantiles), self._dim))
        for i, (below, above, part) in enumerate(map(self._ranks, self._quantiles)):
            for d in range(self._dim):
                out[i, d] = at[d, below] + part * (at[d, above] - at[d, below])
        return out

    def _checked(self, values: np.ndarray) -> np.ndarray:
        if values.ndim != 2 or values.shape[1] != self._dim:
            raise DataError(f"statistics: values have the shape {list(values.shape)}, expected [N, {self._dim}]")
        if not np.isfinite(values).all():
            row, column = np.argwhere(~np.isfinite(values))[0]
            raise DataError(f"statistics: row {row} has {values[row, column]} in dimension {column}, expected finite")
        return values.astype(np.float32, copy=False)

    def _flush(self) -> None:
        if not self._held or (self._counts is None and self._n_held <= self._keep):
            return
        if self._counts is None:
            self._counts = np.zeros((self._dim, _BINS), np.int64)
        values, self._held, self._n_held = np.concatenate(self._held), [], 0
        for d in range(self._dim):
            self._counts[d] += np.bincount(_halves(values[:, d])[0], minlength=_BINS)

    def _ranks(self, q: float) -> tuple[int, int, float]:
        """Return the ranks around a quantile, and its place between them in [0, 1)."""
        last = self.moments.count - 1
        at = q * last
        below = int(at)
        return below, min(below + 1, last), at - below

    def _all_ranks(self) -> list[int]:
        return sorted({r for q in self._quantiles for r in self._ranks(q)[:2]})

    def _bin_of(self, d: int, rank: int) -> int:
        assert self._counts is not None
        return int(np.searchsorted(np.cumsum(self._counts[d]), rank, side="right"))

    def _order_statistic(self, d: int, rank: int) -> float:
        assert self._counts is not None
        k = self._bin_of(d, rank)
        lower = _BINS // 2
        if self._refined:
            counts = self._refined[d, k]
            if counts.sum() != self._counts[d, k]:
                raise DataError("statistics: the second pass has other values than the first. Did the data change?")
            before = int(self._counts[d, :k].sum())
            lower = int(np.searchsorted(np.cumsum(counts), rank - before, side="right"))
        return _number(k, lower)


def _halves(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return upper and lower 16 bits of keys that order as the numbers float32 do."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    keys = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))  # negative numbers order the other way round
    return (keys >> 16).astype(np.int64), (keys & 0xFFFF).astype(np.int64)


def _number(upper: int, lower: int) -> float:
    """Invert `_halves`."""
    key = (upper << 16) | lower
    bits = key & 0x7FFFFFFF if key >> 31 else ~key & 0xFFFFFFFF
    return float(np.uint32(bits).view(np.float32))

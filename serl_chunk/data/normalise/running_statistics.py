"""Statistics of streams of vectors: moments by merging, and exact quantiles.

Quantiles are numpy's default: the order statistics around rank `q * (n - 1)`, linearly interpolated. Up to
`KEEP` values are held in memory, more in a temporary file: 4 bytes a value. One dimension at a time is sorted in the
end, which takes 8 bytes of memory a vector.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from typing import IO

import numpy as np

from serl_chunk.io import os_faults
from serl_chunk.types import DataError

KEEP = 20_000_000  # values held in memory: 80 MB as float32


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
    """Moments and quantiles of a stream of vectors of `dim` values, taken as float32."""

    def __init__(self, dim: int, quantiles: Sequence[float] = (0.01, 0.99)) -> None:
        self.moments = Moments.empty(dim)
        self._dim, self._quantiles = dim, np.array(quantiles)
        self._held: list[np.ndarray] = []
        self._n_held = 0  # values
        self._file: IO[bytes] | None = None  # float32 rows that came before those held

    def add(self, values: np.ndarray) -> None:
        """Add rows float[N, D]. Raises DataError where one is not finite or has another length."""
        if values.ndim != 2 or values.shape[1] != self._dim:
            raise DataError(f"statistics: values have the shape {list(values.shape)}, expected [N, {self._dim}]")
        if not np.isfinite(values).all():
            row, column = np.argwhere(~np.isfinite(values))[0]
            raise DataError(f"statistics: row {row} has {values[row, column]} in dimension {column}, expected finite")
        rows = values.astype(np.float32, order="C")  # a copy: the caller may reuse its buffer
        self.moments = self.moments.merged(Moments.of(rows))
        self._held.append(rows)
        self._n_held += rows.size
        if self._n_held > KEEP:
            self._spill()

    def quantile(self) -> np.ndarray:
        """Return float64[Q, D]. Raises DataError of no vectors."""
        if not self.moments.count:
            raise DataError("statistics: there is no step")
        blocks = self._held
        if self._file is not None:
            blocks = [np.memmap(self._file, np.float32, "r").reshape(-1, self._dim), *blocks]
        columns = (np.concatenate([block[:, d] for block in blocks], dtype=np.float64) for d in range(self._dim))
        return np.stack([np.quantile(column, self._quantiles, overwrite_input=True) for column in columns], axis=1)

    def _spill(self) -> None:
        remedy = "Make room there, set TMPDIR to another folder, or take fewer samples"
        with os_faults(DataError, f"statistics: {tempfile.gettempdir()} has no room for their values", remedy):
            self._file = self._file or tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as this object)
            for block in self._held:
                self._file.write(block.data)  # `block.tofile` would not notice a full disk
            self._file.flush()
        self._held, self._n_held = [], 0

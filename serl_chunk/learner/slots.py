"""Places of an array: which are free, and which were never needed."""

from __future__ import annotations

import numpy as np


class Slots:
    """Which of `capacity` places are free. Returned places are handed out before fresh ones, so that memory which
    was never needed is never touched."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._returned = np.empty(capacity, np.int64)
        self._n_returned = 0
        self._fresh = 0  # places from here on were never given out

    @property
    def nbytes(self) -> int:
        """Bytes of address space."""
        return self._returned.nbytes

    @property
    def used(self) -> int:
        """Places given out and not returned."""
        return self._fresh - self._n_returned

    def take(self, n: int) -> np.ndarray:
        """`n` places, int64[n]. The caller knows that they exist: quotas are its business."""
        if self.used + n > self.capacity:
            raise RuntimeError(f"{n} places asked for, {self.capacity - self.used} of {self.capacity} are free")
        old = min(n, self._n_returned)
        self._n_returned -= old
        again = self._returned[self._n_returned : self._n_returned + old]
        out = np.concatenate([again, np.arange(self._fresh, self._fresh + n - old)])
        self._fresh += n - old
        return out

    def give_back(self, places: np.ndarray) -> None:
        """Free `places` int64[K], which `take` gave out."""
        self._returned[self._n_returned : self._n_returned + len(places)] = places
        self._n_returned += len(places)

"""Free places of arrays that are allocated once."""

from __future__ import annotations

import numpy as np


class FreeList:
    """The free ones of `capacity` places. Returned ones are handed out first: memory not needed is never touched."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._returned = np.empty(capacity, np.int64)
        self._n_returned = 0
        self._fresh = 0  # places from here on were never given out

    @property
    def nbytes(self) -> int:
        return self._returned.nbytes

    @property
    def used(self) -> int:
        return self._fresh - self._n_returned

    def take(self, n: int) -> np.ndarray:
        if self.used + n > self.capacity:  # quotas are the caller's business
            raise RuntimeError(f"{n} places requested, {self.capacity - self.used} of {self.capacity} are free")
        old = min(n, self._n_returned)
        self._n_returned -= old
        again = self._returned[self._n_returned : self._n_returned + old]
        fresh = np.arange(self._fresh, self._fresh + n - old)
        self._fresh += len(fresh)
        return np.concatenate([again, fresh])

    def give_back(self, places: np.ndarray) -> None:
        self._returned[self._n_returned : self._n_returned + len(places)] = places
        self._n_returned += len(places)

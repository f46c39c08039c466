"""Records whose images arrive encoded, as JPEG files do."""

import dataclasses

import numpy as np

from serl_chunk.types import DataError, SparseRows, StepBlock


class Encoded:
    """Images that count how often they are decoded; those of `broken` ticks cannot be."""

    dtype, ndim = np.dtype(np.uint8), 4
    decoded = 0
    broken = frozenset()

    def __init__(self, values: np.ndarray) -> None:
        self._values, self.shape, self.nbytes = values, values.shape, values.nbytes

    def __getitem__(self, i):
        if isinstance(i, int):
            Encoded.decoded += 1
            if int(self._values[i, 0, 0, 2]) in self.broken:
                raise DataError("damaged")
            return self._values[i]
        return Encoded(self._values[i])

    def __array__(self, dtype=None, copy=None):
        return np.stack([self[i] for i in range(len(self._values))])


def encoded(record):
    """A record whose images are encoded."""
    if isinstance(record, StepBlock):
        rows = {k: SparseRows(r.index, Encoded(r.values)) for k, r in record.sparse.items()}
        return dataclasses.replace(record, sparse=rows)
    return record


class Insert:
    """A replay that gets every record with encoded images."""

    def __init__(self, replay) -> None:
        self._replay = replay

    def __getattr__(self, name):
        return getattr(self._replay, name)

    def insert(self, session, record):
        return self._replay.insert(session, encoded(record))

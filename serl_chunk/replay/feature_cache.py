"""Features of stored frames, computed once by a frozen backbone and kept next to them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

import numpy as np

from serl_chunk.types import CameraSpec

PLACE_BYTES = 9  # of a frame's place, in addition to its features: what it holds, and how often it was written
_EMPTY, _FRAME, _KNOWN = 0, 1, 2  # no frame; a frame whose features are not computed yet; one with features


class Embedder(Protocol):
    """Computes features float16[N, h, w, C] of images uint8[N, H, W, 3]."""

    def shape(self, camera: CameraSpec) -> tuple[int, int, int]: ...

    def __call__(self, images: np.ndarray) -> np.ndarray: ...


def feature_bytes(embed: Embedder, camera: CameraSpec) -> int:
    """Return the bytes of one frame's features."""
    return 2 * int(np.prod(embed.shape(camera)))


Fetch = Callable[[], object]  # fills in a part of a batch, without a lock; raises DataError for an unreadable file


class FrameFeatures:
    """Features of one camera's frames by their slots; safe to use from several threads.

    Each write of a frame calls `placed`: features that were computed of the one before are not kept. `places`: slots at
    first; more are made as frames need them. Memory becomes resident as it is filled.
    """

    def __init__(self, embed: Embedder, camera: CameraSpec, places: int) -> None:
        self.embed, self.camera = embed, camera
        self._values = np.empty((places, *embed.shape(camera)), np.float16)
        self._holds = np.zeros(places, np.uint8)
        self._writes = np.zeros(places, np.int64)
        self._lock = threading.Lock()
        self.computed = 0  # so far

    @property
    def nbytes(self) -> int:
        return self._values.nbytes + self._holds.nbytes + self._writes.nbytes

    @property
    def known(self) -> int:
        return int((self._holds == _KNOWN).sum())

    @property
    def missing(self) -> int:
        return int((self._holds == _FRAME).sum())

    @property
    def held_bytes(self) -> int:
        return self.known * self._values[:1].nbytes

    def placed(self, slots: np.ndarray) -> None:
        """New frames are in `slots` int64[K]; makes places for them."""
        with self._lock:
            more = int(slots.max(initial=-1)) + 1 - len(self._holds)
            if more > 0:
                more = max(more, len(self._holds) // 4)
                self._values, self._holds, self._writes = (
                    np.concatenate([a, np.zeros((more, *a.shape[1:]), a.dtype)])
                    for a in (self._values, self._holds, self._writes)
                )
            self._holds[slots] = _FRAME
            self._writes[slots] += 1

    def released(self, slots: np.ndarray) -> None:
        with self._lock:
            self._holds[slots] = _EMPTY
            self._writes[slots] += 1

    def read(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return fresh features float16[B, h, w, C] of `slots` int64[B], and bool[B], which of them are defined."""
        with self._lock:
            return self._values[slots], self._holds[slots] == _KNOWN

    def writes(self, slots: np.ndarray) -> np.ndarray:
        """Return how often each of `slots` int64[K] was written so far, int64[K]."""
        with self._lock:
            return self._writes[slots]

    def first_missing(self, limit: int) -> np.ndarray:
        """Up to `limit` slots of frames without features, int64[K]."""
        return np.flatnonzero(self._holds == _FRAME)[:limit]

    def keep(self, slots: np.ndarray, writes: np.ndarray, values: np.ndarray) -> None:
        """Keep `values` float16[K, h, w, C] of the frames in `slots` that were not written since `writes`."""
        with self._lock:
            self.computed += len(values)
            same = self._writes[slots] == writes
            slots = slots[same]
            self._values[slots] = values[same]
            self._holds[slots] = _KNOWN

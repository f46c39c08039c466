"""The batches of the phase a learner is in."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from serl_chunk.learner.replay import Half, Replay
from serl_chunk.learner.sampler import BatchStream
from serl_chunk.types import CameraSpec

SCAN = 20  # updates of a phase before training in one compiled call (lengths are rounded up): amortises the dispatch
PIECE_BYTES = 256 << 20  # of their images; several such pieces are on their way at a time


def updates_at_once(batch_size: int, cameras: Sequence[CameraSpec]) -> int:
    """How many batches are drawn and brought to the device as one piece in the phases before training; 1 at least."""
    pixels = sum(c.height * c.width * 3 for c in cameras)  # of an observation; a window has two
    return max(1, min(SCAN, PIECE_BYTES // max(1, 2 * batch_size * pixels)))


class PhaseBatches:
    """One stream of batches at a time, on the device; another size or half of the data gets another stream."""

    def __init__(self, replay: Replay, rng: np.random.Generator, batch_size: int, prefetch: int) -> None:
        self._replay, self._rng, self._batch_size, self._prefetch = replay, rng, batch_size, prefetch
        self._stream: BatchStream | None = None
        self._of: tuple[int, Half | None] | None = None

    def stream(self, updates: int, half: Half | None) -> BatchStream:
        """Batches for compiled calls of `updates` updates, drawn from `half` alone where it is given."""
        if self._stream is None or self._of != (updates, half):
            self.close()
            self._of = updates, half
            self._stream = BatchStream(
                self._replay,
                self._rng,
                self._batch_size,
                updates,
                half=half,
                put=jax.device_put,
                prefetch=self._prefetch,
            )
        return self._stream

    def close(self) -> None:
        """End the stream: what it prepared ahead was drawn from the data of before."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

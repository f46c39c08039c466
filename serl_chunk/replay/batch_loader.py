"""Batches of training windows for the current phase, prepared ahead by a thread where that is configured."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from serl_chunk.replay.replay import Half, Replay
from serl_chunk.types import CameraSpec, ChunkBatch


class BatchStream:
    """Batches of `updates` x `batch_size` windows, one for each compiled update.

    With `prefetch=0` a batch is drawn by `next`, and a seed reproduces a run. With `prefetch=P` a thread, started by
    the first `next`, keeps up to P batches ready; only it uses `rng`. Every batch has fresh arrays: JAX reads them
    after a call has returned, and may keep them as the device array itself.

    Args:
        half: the half that whole batches are drawn from; None for both, as configured.
        put: applied to every batch where it is prepared, for example to copy it to a device.
    """

    def __init__(
        self, replay: Replay, rng: np.random.Generator, batch_size: int, updates: int,
        *, half: Half | None = None, put: Callable[[ChunkBatch], Any] = lambda batch: batch, prefetch: int = 0,
    ) -> None:  # fmt: skip
        self._sample = functools.partial(replay.sample, rng, batch_size, updates, half=half)
        self._put, self._prefetch, self._closed = put, prefetch, False
        self._ready: deque[Future[Any]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")

    def next(self) -> Any:
        """Return the next batch, arrays of shape [updates, batch_size, ...], after `put`.

        Raises what the preparing thread raised, and RuntimeError after `close`.
        """
        if self._closed:
            raise RuntimeError("the batch stream is closed")
        if not self._prefetch:
            return self._prepare()
        while len(self._ready) < self._prefetch:
            self._ready.append(self._thread.submit(self._prepare))
        batch = self._ready[0].result()  # an error stays in front: a later call raises it again
        self._ready.popleft()
        self._ready.append(self._thread.submit(self._prepare))
        return batch

    def _prepare(self) -> Any:
        return self._put(self._sample())

    def close(self) -> None:
        """Stop the thread and drop what it prepared; may be called twice."""
        self._closed = True
        self._thread.shutdown(cancel_futures=True)
        self._ready.clear()


SCAN = 20  # updates in one compiled call of a phase before training: amortises the dispatch
PIECE_BYTES = 256 << 20  # of their images; several such pieces are in memory at a time


def updates_at_once(batch_size: int, cameras: Sequence[CameraSpec]) -> int:
    """Return how many batches go to the device as one piece in the phases before training; 1 at least."""
    pixels = sum(c.height * c.width * 3 for c in cameras)  # of an observation; a window has two
    return max(1, min(SCAN, PIECE_BYTES // max(1, 2 * batch_size * pixels)))


class BatchLoader:
    """One stream of batches at a time, on the device; another size or half of the data gets another stream."""

    def __init__(self, replay: Replay, rng: np.random.Generator, batch_size: int, prefetch: int) -> None:
        self._source, self._prefetch = (replay, rng, batch_size), prefetch
        self._stream: BatchStream | None = None
        self._of: tuple[int, Half | None] | None = None

    def stream(self, updates: int, half: Half | None) -> BatchStream:
        """Batches for compiled calls of `updates` updates, drawn from `half` alone where it is given."""
        if self._stream is None or self._of != (updates, half):
            self.close()
            self._of = updates, half
            self._stream = BatchStream(*self._source, updates, half=half, put=jax.device_put, prefetch=self._prefetch)
        return self._stream

    def close(self) -> None:
        """End the stream: what it prepared ahead was drawn from the data of before."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

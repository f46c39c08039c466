"""Requests of several clients, decided together on a thread of their own."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

from serl_chunk.types import SerlChunkError

logger = logging.getLogger(__name__)
Item = TypeVar("Item")
Answer = TypeVar("Answer")


def batch_sizes(largest: int) -> tuple[int, ...]:
    """Return the sizes that batches are padded to: powers of two, and `largest`."""
    return tuple(sorted({*(1 << i for i in range(largest.bit_length()) if 1 << i <= largest), largest}))


class BatchThread(Generic[Item, Answer]):
    """Decides what has come since the batch before, `largest` at most, in one call.

    No request waits for others: while one batch is computed, the next one gathers.

    Args:
        decide: returns an answer, or the error of one, for each item. It gets as many items as one of `batch_sizes`:
            the first item again for each that is missing, whose answers are dropped.
    """

    def __init__(self, decide: Callable[[Sequence[Item]], Sequence[Answer | SerlChunkError]], largest: int) -> None:
        self.sizes = batch_sizes(largest)
        self.counts = dict.fromkeys(range(1, largest + 1), 0)
        """Number of items -> batches of so many, padding not counted."""
        self._decide = decide
        self._waiting: queue.SimpleQueue[tuple[Item, Future[Answer]] | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="batches", daemon=True)
        self._thread.start()

    def submit(self, item: Item) -> Future[Answer]:
        """Return the answer to come. It holds a SerlChunkError for an item that cannot be decided."""
        future: Future[Answer] = Future()
        self._waiting.put((item, future))
        return future

    def close(self) -> None:
        """End the thread after the batch under way; what waits is cancelled."""
        self._closed = True
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        while not self._closed:
            batch = [entry] if (entry := self._waiting.get()) is not None else []
            while len(batch) < self.sizes[-1]:
                try:
                    following = self._waiting.get_nowait()
                except queue.Empty:
                    break
                if following is not None:
                    batch.append(following)
            # A client that left meanwhile has cancelled its own.
            if batch := [each for each in batch if each[1].set_running_or_notify_cancel()]:
                self._answer(batch)
        while not self._waiting.empty():
            if (left := self._waiting.get()) is not None:
                left[1].cancel()

    def _answer(self, batch: list[tuple[Item, Future[Answer]]]) -> None:
        items = [item for item, _ in batch]
        size = next(size for size in self.sizes if size >= len(items))
        answers: Sequence[Answer | BaseException]
        try:
            answers = self._decide([*items, *[items[0]] * (size - len(items))])
        except Exception as error:  # of all of them: this thread decides for the clients after these too
            logger.exception("a batch could not be decided")
            answers = [error] * len(items)
        self.counts[len(items)] += 1
        for (_, future), answer in zip(batch, answers, strict=False):
            if isinstance(answer, BaseException):
                future.set_exception(answer)
            else:
                future.set_result(answer)

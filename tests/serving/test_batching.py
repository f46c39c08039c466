"""Requests of several clients in one batch."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError

import pytest

from serl_chunk.serving.server import BatchThread, batch_sizes
from serl_chunk.types import SerlChunkError


class Held:
    """Doubles numbers, once it is let go; -1 has an error of its own, -2 fails the whole batch."""

    def __init__(self):
        self.go, self.begun, self.batches = threading.Event(), threading.Event(), []

    def __call__(self, items):
        self.begun.set()
        assert self.go.wait(10)
        self.batches.append(list(items))
        if -2 in items:
            raise ZeroDivisionError
        return [SerlChunkError("none") if item == -1 else 2 * item for item in items]


@pytest.fixture
def held():
    return Held()


@pytest.fixture
def batches(held):
    """A thread that makes batches of four at most, and has begun with 1 alone."""
    batches = BatchThread(held, 4)
    batches.first = batches.submit(1)
    assert held.begun.wait(10)
    yield batches
    batches.close()


def test_what_gathers_meanwhile_is_one_batch_padded_with_its_first(held, batches):
    assert [batch_sizes(most) for most in (1, 8, 6)] == [(1,), (1, 2, 4, 8), (1, 2, 4, 6)]
    others = [batches.submit(i) for i in (2, 3, 4)]
    held.go.set()
    assert [f.result(10) for f in (batches.first, *others)] == [2, 4, 6, 8]
    assert held.batches == [[1], [2, 3, 4, 2]]
    assert {n: count for n, count in batches.counts.items() if count} == {1: 1, 3: 1}


def test_no_batch_is_larger_than_the_largest_and_one_that_fails_ends_no_other(held, batches):
    futures = [batches.submit(i) for i in range(9)]
    held.go.set()
    assert [f.result(10) for f in futures] == list(range(0, 18, 2))
    assert max(map(len, held.batches)) == 4
    with pytest.raises(ZeroDivisionError):
        batches.submit(-2).result(10)
    assert batches.submit(3).result(10) == 6


def test_an_error_of_one_is_of_that_one_alone_and_a_client_that_left_costs_nothing(held, batches):
    gone, bad, good = (batches.submit(i) for i in (7, -1, 5))
    assert gone.cancel()
    held.go.set()
    assert (batches.first.result(10), good.result(10)) == (2, 10)
    with pytest.raises(SerlChunkError, match="none"):
        bad.result(10)
    assert held.batches == [[1], [-1, 5]]


def test_what_waits_at_the_end_is_cancelled(held):
    batches = BatchThread(held, 1)
    first, second = batches.submit(1), batches.submit(2)
    assert held.begun.wait(10)
    closing = threading.Thread(target=batches.close)
    closing.start()
    while not batches._closed:
        pass
    held.go.set()
    closing.join(10)
    assert first.result(10) == 2
    with pytest.raises(CancelledError):
        second.result(10)

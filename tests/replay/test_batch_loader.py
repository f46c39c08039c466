import threading

import numpy as np
import pytest
from coded_episodes import SPEC, config, feed, make, normaliser
from errors import naming

from serl_chunk.replay.batch_loader import BatchStream
from serl_chunk.replay.replay import Replay
from serl_chunk.types import DataError


@pytest.fixture
def replay():
    cfg = config()
    replay = Replay(SPEC, cfg, normaliser(6), image_keys=("a",))
    feed(replay, [make(np.random.default_rng(k), k, every_frame=True) for k in range(10)], np.random.default_rng(0))
    return replay


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_batches_are_the_same_with_and_without_the_thread(replay, prefetch):
    reference = np.random.default_rng(7)
    stream = BatchStream(replay, np.random.default_rng(7), 8, 3, prefetch=prefetch)
    for _ in range(6):
        batch, expected = stream.next(), replay.sample(reference, 8, 3)
        assert batch.actions.shape == (3, 8, 6, 2)
        assert batch.observations["images/a"].shape == (3, 8, 2, 4, 3)
        assert batch.delay.shape == (3, 8)
        np.testing.assert_array_equal(batch.observations["state"], expected.observations["state"])
    stream.close()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_put_is_applied_where_the_batch_is_prepared(replay, prefetch):
    threads = []

    def put(batch):
        threads.append(threading.current_thread().name.removesuffix("_0"))
        return {"wrapped": batch}

    stream = BatchStream(replay, np.random.default_rng(0), 4, 1, put=put, prefetch=prefetch)
    assert set(stream.next()) == {"wrapped"}
    stream.close()
    assert set(threads) == {"batches" if prefetch else threading.current_thread().name}


@pytest.mark.parametrize("prefetch", [0, 2])
def test_no_two_batches_share_memory(replay, prefetch):
    stream = BatchStream(replay, np.random.default_rng(0), 16, 2, prefetch=prefetch)
    batches = [stream.next() for _ in range(5)]
    arrays = [
        [*b.observations.values(), *b.next_observations.values(), b.actions, b.rewards, b.bc_weight] for b in batches
    ]
    for i, first in enumerate(arrays):
        for second in arrays[i + 1 :]:
            assert not any(np.shares_memory(a, b) for a in first for b in second)
    stream.close()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_reaches_the_caller_every_time(prefetch):
    empty = Replay(SPEC, config(), normaliser(6))
    stream = BatchStream(empty, np.random.default_rng(0), 4, 1, prefetch=prefetch)
    for _ in range(2):
        with pytest.raises(DataError, match=naming(4, 0)):
            stream.next()
    stream.close()


def test_batches_prepared_before_an_error_are_still_given(replay):
    prepared = []

    def put(batch):
        prepared.append(batch)
        if len(prepared) == 3:
            raise ValueError("device full")
        return batch

    stream = BatchStream(replay, np.random.default_rng(0), 4, 1, put=put, prefetch=5)
    assert stream.next() is prepared[0]
    assert stream.next() is prepared[1]
    with pytest.raises(ValueError, match="device full"):
        stream.next()
    stream.close()


def test_no_more_than_prefetch_batches_wait(replay):
    prepared = threading.Semaphore(0)
    count = []

    def put(batch):
        count.append(1)
        prepared.release()
        return batch

    stream = BatchStream(replay, np.random.default_rng(0), 4, 1, put=put, prefetch=2)
    stream.next()
    for _ in range(3):  # one taken, two waiting
        assert prepared.acquire(timeout=10)
    stream.close()  # joins the thread: it has not begun another
    assert len(count) == 3


@pytest.mark.parametrize("prefetch", [0, 2])
def test_close_ends_the_thread_and_the_stream(replay, prefetch):
    stream = BatchStream(replay, np.random.default_rng(0), 4, 1, prefetch=prefetch)
    stream.next()
    stream.close()
    stream.close()
    assert not any(t.name.startswith("batches") for t in threading.enumerate())
    with pytest.raises(RuntimeError, match=naming("closed")):
        stream.next()

import threading

import numpy as np
import pytest
from coded_episodes import SPEC, config, feed, make, preprocess
from errors import naming

from serl_chunk.replay.replay import BatchLoader, Replay, Request
from serl_chunk.types import DataError

ONE = Request("critic", 1, 4)


@pytest.fixture
def replay():
    cfg = config()
    replay = Replay(SPEC, cfg, preprocess(cfg, ("a",)))
    feed(replay, [make(np.random.default_rng(k), k, every_frame=True) for k in range(10)], np.random.default_rng(0))
    return replay


@pytest.mark.parametrize("prefetch", [0, 3])
def test_batches_are_the_same_with_and_without_the_thread(replay, prefetch):
    """And no two share memory."""
    reference, arrays = np.random.default_rng(7), []
    loader = BatchLoader(replay, np.random.default_rng(7), prefetch=prefetch)
    for _ in range(5):
        batch, expected = loader.next(Request("critic", 3, 8))["critic"], replay.sample(reference, 8, 3)
        assert batch.actions.shape == (3, 8, 6, 2)
        assert batch.observations["images/a"].shape == (3, 8, 2, 4, 3)
        assert batch.delay.shape == (3, 8)
        np.testing.assert_array_equal(batch.observations["state"], expected.observations["state"])
        both = (*batch.observations.values(), *batch.next_observations.values())
        arrays.append([*both, batch.actions, batch.rewards, batch.bc_weight])
    for i, first in enumerate(arrays):
        for second in arrays[i + 1 :]:
            assert not any(np.shares_memory(a, b) for a in first for b in second)
    loader.close()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_put_is_applied_where_the_batch_is_prepared_and_no_more_than_prefetch_wait(replay, prefetch):
    threads, prepared = [], threading.Semaphore(0)

    def put(batch):
        threads.append(threading.current_thread().name.removesuffix("_0"))
        prepared.release()
        return {"wrapped": batch}

    loader = BatchLoader(replay, np.random.default_rng(0), put=put, prefetch=prefetch)
    for _ in range(2):
        threads.clear()
        assert set(loader.next(ONE)) == {"wrapped"}
        for _ in range(prefetch + 1):  # one taken, the others waiting
            assert prepared.acquire(timeout=10)
        for _ in range(2):
            loader.close()  # joins the thread: it has not begun another
        assert not any(t.name.startswith("batches") for t in threading.enumerate())
        assert threads == ["batches" if prefetch else threading.current_thread().name] * (prefetch + 1)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_reaches_the_caller_every_time(prefetch):
    empty = Replay(SPEC, config(), preprocess(config()))
    loader = BatchLoader(empty, np.random.default_rng(0), prefetch=prefetch)
    for _ in range(2):
        with pytest.raises(DataError, match=naming(4, 0)):
            loader.next(ONE)
    loader.close()


def test_batches_prepared_before_an_error_are_still_given(replay):
    prepared = []

    def put(batch):
        prepared.append(batch)
        if len(prepared) == 3:
            raise ValueError("device full")
        return batch

    loader = BatchLoader(replay, np.random.default_rng(0), put=put, prefetch=5)
    assert loader.next(ONE) is prepared[0]
    assert loader.next(ONE) is prepared[1]
    with pytest.raises(ValueError, match="device full"):
        loader.next(ONE)
    loader.close()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_other_requests_or_another_half_drop_what_was_prepared(prefetch):
    class Drawn:
        def sample(self, rng, batch_size, updates, *, half, next_observations):
            return updates, batch_size, half, next_observations

    loader = BatchLoader(Drawn(), np.random.default_rng(0), prefetch=prefetch)
    both = (Request("critic", 3, 4), Request("policy", 1, 8, next_observations=False))
    for requests, half in [((ONE,), None), (both, None), (both, "demo"), (both, None)]:
        wanted = {r.name: (r.updates, r.size, half, r.next_observations) for r in requests}
        assert loader.next(*requests, half=half) == loader.next(*requests, half=half) == wanted
    loader.close()


def test_a_batch_without_next_observations_has_all_else_and_reads_no_frame_of_them(replay):
    whole = replay.sample(np.random.default_rng(3), 16, 2)
    batch = replay.sample(np.random.default_rng(3), 16, 2, next_observations=False)
    assert batch.next_observations == {}
    for name, value in batch.observations.items():
        np.testing.assert_array_equal(value, whole.observations[name])
    for name in ("actions", "rewards", "mask", "discount_n", "bc_weight"):
        np.testing.assert_array_equal(getattr(batch, name), getattr(whole, name))

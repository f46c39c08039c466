"""The chunk queue against a plain model of it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from serl_chunk.actor.chunk_queue import ChunkQueue
from serl_chunk.actor.policy import Decision

HOLD = np.array([7.0], np.float32)


def chunk(tick: int, epoch: int = 0, horizon: int = 6) -> Decision:
    """Action i of the chunk decided on tick t is 100 t + i."""
    return Decision((100 * tick + np.arange(horizon, dtype=np.float32))[:, None], {}, tick, tick=tick, epoch=epoch)


def queue_of(execute_steps: int) -> ChunkQueue:
    """A queue of a robot that holds by repeating."""
    return ChunkQueue(execute_steps, lambda action: action)


def value(queue: ChunkQueue, tick: int) -> float | None:
    queued = queue.pop(tick)
    return None if queued is None else float(queued.command[0])


def test_committed_follows_later_chunks_and_holds_in_gaps():
    queue = queue_of(5)
    queue.join(chunk(0), 3)
    queue.join(chunk(2), 5)
    np.testing.assert_array_equal(queue.committed(1, 8, HOLD)[:, 0], [7, 7, 3, 4, 203, 204, 204, 204])
    assert queue.remaining(3) == 4
    assert queue.remaining(1) == 0
    assert queue.due(1) == 7


def test_committed_holds_as_the_robot_will():
    queue = ChunkQueue(3, lambda action: 0 * action)  # commanded by differences
    queue.join(chunk(1), 1)
    np.testing.assert_array_equal(queue.committed(1, 5, np.zeros(1, np.float32))[:, 0], [100, 101, 102, 0, 0])


@given(execute=st.integers(1, 6), events=st.lists(st.sampled_from(["pass", "plan", "join", "flush"]), max_size=60))
def test_random_histories(execute, events):
    queue = queue_of(execute)
    planned: Decision | None = None
    current: Decision | None = None
    tick = 0
    for event in events:
        if event == "plan":
            planned = chunk(tick, queue.epoch)
        elif event == "flush":
            queue.flush()
            current = None
        elif event == "join" and planned is not None:
            fits = planned.epoch == queue.epoch and tick - planned.tick < execute
            newer = current is None or planned.tick > current.tick
            expected = tick - planned.tick if fits and newer else None
            assert queue.join(planned, tick) == expected
            current = planned if expected is not None else current
        index = tick - current.tick if current else execute
        left = max(0, execute - index) if current else 0
        assert queue.remaining(tick) == left
        assert value(queue, tick) == (100 * current.tick + index if current and left else None)
        tick += event == "pass"

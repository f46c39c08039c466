"""The chunk queue against a plain model of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serl_chunk.actor.chunk_queue import ChunkQueue
from serl_chunk.actor.policy import Decision


def chunk(tick: int, epoch: int = 0, horizon: int = 6) -> Decision:
    """Action i of the chunk decided on tick t is 100 t + i."""
    return Decision((100 * tick + np.arange(horizon, dtype=np.float32))[:, None], {}, tick, tick=tick, epoch=epoch)


@pytest.mark.parametrize(("hold", "committed"), [
    (lambda action: action, [7, 7, 3, 4, 203, 204, 204, 204]),
    (lambda action: 0 * action, [7, 0, 3, 4, 203, 204, 0, 0]),  # of a robot that is commanded by differences
])  # fmt: skip
def test_committed_follows_later_chunks_and_holds_as_the_robot_will(hold, committed):
    queue = ChunkQueue(5, hold)
    assert (queue.pop(0), queue.remaining(3), queue.due(3)) == (None, 0, 3)
    queue.join(chunk(0), 3)
    queue.join(chunk(2), 5)
    np.testing.assert_array_equal(queue.committed(1, 8, np.array([7.0], np.float32))[:, 0], committed)
    assert (queue.remaining(3), queue.remaining(1), queue.due(1)) == (4, 0, 7)


@given(execute=st.integers(1, 6), events=st.lists(st.sampled_from(["pass", "plan", "join", "flush"]), max_size=60))
def test_random_histories(execute, events):
    queue = ChunkQueue(execute, lambda action: action)
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
        queued = queue.pop(tick)
        assert (queued and queued.command[0]) == (100 * current.tick + index if current and left else None)
        tick += event == "pass"

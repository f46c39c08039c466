"""Records out of the steps that an actor hands over: consecutive ones travel as one block."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np

from serl_chunk.types import DECISION_PREFIX, IMAGE_PREFIX, Record, Step, StepBlock

_MAX_BLOCK_STEPS = 512
# Measured with camera rows: more means fresh memory pages for every block, less means more calls.
MAX_BLOCK_BYTES = 1 << 20
TURN_BYTES = 4 * MAX_BLOCK_BYTES  # made at a time, so that sending and heartbeats get their turn
_TURN_RECORDS = 256  # the same for small ones: each takes some 50 us to pack and send
FIXED_STEP_BYTES = 64  # of a step beside its arrays, rounded up

QueuedRecord = tuple[str, Step | Record, int]  # episode, what was handed over, bytes of its arrays
PackedRecord = tuple[Record, int, int]  # a record, bytes of its arrays, how many things handed over are in it


def make_records(
    queue: collections.deque[QueuedRecord], made: collections.deque[PackedRecord], block_bytes: int
) -> None:
    """Move a turn's worth of `queue` into `made`; consecutive steps become blocks of at most `block_bytes`."""
    block: list[Step] = []
    nbytes_of_block, block_episode, shapes = 0, "", _Shapes()
    moved = 0

    def finish() -> None:
        nonlocal block, nbytes_of_block
        if block:
            made.append((StepBlock.from_steps(block_episode, block), nbytes_of_block, len(block)))
            block, nbytes_of_block = [], 0

    while queue and moved < TURN_BYTES and len(made) < _TURN_RECORDS:
        episode, record, nbytes = queue.popleft()
        moved += nbytes + FIXED_STEP_BYTES
        if not isinstance(record, Step):
            finish()
            made.append((record, nbytes, 1))
            continue
        if block and (
            episode != block_episode
            or record.tick != block[-1].tick + 1
            or len(block) == _MAX_BLOCK_STEPS
            or nbytes_of_block + nbytes > block_bytes
            or not shapes.fit(record)
        ):
            finish()
        if not block:
            shapes = _Shapes()
            shapes.fit(record)
        block.append(record)
        nbytes_of_block, block_episode = nbytes_of_block + nbytes, episode
    finish()


class _Shapes:
    """The shapes of a block's arrays: steps that differ do not share columns."""

    def __init__(self) -> None:
        self._dense: dict[str, Any] | None = None
        self._sparse: dict[str, tuple[Any, ...]] = {}

    def fit(self, step: Step) -> bool:
        """Whether a step goes into the block; one that does adds its images' and decision's shapes."""
        dense: dict[str, Any] = {"": step.action.shape}
        sparse = {DECISION_PREFIX + k: np.asarray(v) for k, v in step.decision.items()} if step.decision else {}
        for key, value in step.observation.items():
            if key.startswith(IMAGE_PREFIX):
                sparse[key] = value
            else:
                dense[key] = value.shape
        if self._dense is not None and dense != self._dense:
            return False
        if any(self._sparse.get(k, (v.shape, v.dtype)) != (v.shape, v.dtype) for k, v in sparse.items()):
            return False
        self._dense = dense
        self._sparse.update({k: (v.shape, v.dtype) for k, v in sparse.items()})
        return True

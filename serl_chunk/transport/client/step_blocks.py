"""Packs consecutive steps into StepBlock records for sending."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np

from serl_chunk.types import DECISION_PREFIX, IMAGE_PREFIX, Record, Step, StepBlock

_MAX_BLOCK_STEPS = 512
# Measured with camera rows: more means fresh memory pages for every block, less means more calls.
MAX_BLOCK_BYTES = 1 << 20
_TURN_BYTES = 4 * MAX_BLOCK_BYTES  # made at a time, so that sending and heartbeats get their turn
_TURN_RECORDS = 256  # the same for small ones: each takes some 50 us to pack and send
FIXED_STEP_BYTES = 64  # of a step in addition to its arrays, rounded up

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
        nonlocal block, nbytes_of_block, shapes
        if block:
            made.append((StepBlock.from_steps(block_episode, block), nbytes_of_block, len(block)))
            block, nbytes_of_block, shapes = [], 0, _Shapes()

    while queue and moved < _TURN_BYTES and len(made) < _TURN_RECORDS:
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
            or not shapes.fit(block[-1], record)
        ):
            finish()
        block.append(record)
        nbytes_of_block, block_episode = nbytes_of_block + nbytes, episode
    finish()


class _Shapes:
    """The shapes of a block's arrays: steps that differ do not share columns."""

    def __init__(self) -> None:
        self._dense: dict[str, Any] | None = None
        self._sparse: dict[str, tuple[Any, ...]] = {}

    def fit(self, first: Step, step: Step) -> bool:
        """Whether a step fits those before it, or `first` where there is one alone. Adds its sparse shapes then."""
        if self._dense is None:
            self._dense, self._sparse = self._of(first)
        dense, sparse = self._of(step)
        if dense != self._dense or any(self._sparse.get(key, shape) != shape for key, shape in sparse.items()):
            return False
        self._sparse.update(sparse)
        return True

    @staticmethod
    def _of(step: Step) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
        dense: dict[str, Any] = {"": step.action.shape}
        sparse = {DECISION_PREFIX + k: np.asarray(v) for k, v in step.decision.items()} if step.decision else {}
        for key, value in step.observation.items():
            if key.startswith(IMAGE_PREFIX):
                sparse[key] = value
            else:
                dense[key] = value.shape
        return dense, {key: (value.shape, value.dtype) for key, value in sparse.items()}

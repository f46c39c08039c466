"""Features of the frames that are stored when training begins: demonstrations, and what a journal put back."""

from __future__ import annotations

import time
from collections.abc import Callable

from serl_chunk.learner.replay import Replay

FRAMES = 64  # of one piece of work: short enough to stop and to be seen within
SAY_EVERY = 5.0  # seconds between lines


class CatchUp:
    """Computes them in pieces, and says how far it is; what comes in meanwhile is left to the batches that show it.

    Args:
        say: prints one line for a person.
        now: seconds of a clock that never goes back.
    """

    def __init__(self, replay: Replay, say: Callable[[str], None], now: Callable[[], float] = time.monotonic) -> None:
        self._replay, self._say, self._now = replay, say, now
        self._total = -1  # frames that lacked features at the first call
        self._done = 0
        self._begun = self._said = 0.0

    def work(self) -> bool:
        """One piece; False where none is left. Raises DataError for a file of a demonstration that cannot be read."""
        if self._total < 0:
            self._total = self._replay.frames_unseen
            self._begun = self._said = self._now()
        if self._done >= self._total:
            return False
        computed = self._replay.embed_frames(FRAMES)
        # Fewer may be left than there were: episodes leave.
        self._done = min(self._total, self._done + computed) if computed else self._total
        if self._done == self._total:
            self._say(f"features of {self._total:,} stored frames computed in {self._now() - self._begun:.1f} s")
        elif self._now() - self._said >= SAY_EVERY:
            self._said = self._now()
            self._say(f"computing features of stored frames: {self._done:,} of {self._total:,}")
        return True

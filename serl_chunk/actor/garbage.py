"""When the interpreter collects garbage: never within an episode, for a collection stops the control thread.

With 227,000 objects alive, which JAX and what it compiled are, a full collection takes 111 to 118 ms: five ticks of a
robot at 50 Hz.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from serl_chunk.actor.clock import Clock

LONGEST_PAUSE = 600.0  # seconds; an episode that lasts longer collects where the robot holds anyway


class GarbageSchedule:
    """Moves the collections of this process out of a realtime actor's episodes. One control thread uses it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._frozen = False
        self._collected = clock.now()

    def freeze(self) -> None:
        """Leave everything that is alive now, compiled programs above all, out of every later collection."""
        self._frozen = self._frozen or not gc.get_freeze_count()  # what others froze stays so
        self._collect()
        gc.freeze()

    @contextlib.contextmanager
    def episode(self) -> Iterator[None]:
        """Collect nothing until the block is left, then everything; an error is passed on at once."""
        enabled = gc.isenabled()
        gc.disable()
        self._collected = self._clock.now()
        try:
            yield
            self._collect()
        finally:
            if enabled:
                gc.enable()

    def holding(self) -> None:
        """Collect within an episode that goes on for long: the robot was just commanded to stay where it is."""
        if self._clock.now() - self._collected > LONGEST_PAUSE:
            self._collect()

    def close(self) -> None:
        """Let later collections look at everything again."""
        if self._frozen:
            gc.unfreeze()
            self._frozen = False

    def _collect(self) -> None:
        gc.collect()
        self._collected = self._clock.now()

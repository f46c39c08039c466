"""A trace of JAX's profiler over some updates of a run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax

logger = logging.getLogger(__name__)

PROFILE = "profile"  # in a run folder


class UpdateTrace:
    """Traces the first `updates` updates after those of the first call, which compiles; 0: none. For one thread.

    The trace is of the whole process: what its devices compute, and what its threads do meanwhile.
    """

    def __init__(self, folder: Path, updates: int) -> None:
        self._folder, self._left, self._total = folder, updates, updates
        self._running = False

    def updated(self, updates: int, metrics: Any) -> None:
        """Count a call of `updates` updates, whose results are `metrics`; begin or end the trace with it."""
        if self._running:
            self._left -= updates
            if self._left <= 0:
                self._end(metrics)
        elif self._left > 0:
            jax.block_until_ready(metrics)  # else the trace would begin with the end of this call
            jax.profiler.start_trace(str(self._folder))
            self._running = True

    def close(self) -> None:
        """End a trace that is not whole."""
        if self._running:
            self._end(None)

    def _end(self, metrics: Any) -> None:
        jax.block_until_ready(metrics)
        jax.profiler.stop_trace()
        done, self._left, self._running = self._total - max(self._left, 0), 0, False
        logger.info(f"{self._folder}: a trace of {done} updates, for TensorBoard's profile plugin or xprof")

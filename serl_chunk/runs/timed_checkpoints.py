"""A checkpoint about once a minute, each in the place of the one before: a killed learner resumes from it."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from serl_chunk.runs.checkpoints import TIMED, Flat, finished, items_of, orbax_arguments, read_item

logger = logging.getLogger(__name__)

PERIOD = 60.0  # seconds from one to the next
SHARE = 0.05  # of wall time that they may take: with copying, writing and verifying


class TimedCheckpoints:
    """`<run>/checkpoints_timed/<number>/`, written on a thread; the one before is removed once the new one verifies.

    Args:
        run_dir: the run folder.
        period: seconds from one to the next, more where `share` asks for it.
        share: of wall time, 0..1.
        now: seconds of a clock that never goes back.
    """

    def __init__(
        self, run_dir: Path, *, period: float = PERIOD, share: float = SHARE, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._dir = Path(run_dir).absolute() / TIMED
        self._period, self._share, self._now = period, share, now
        self._next = now() + period
        self._thread: threading.Thread | None = None
        self.failed_saves = 0

    @property
    def due(self) -> bool:
        return self._now() >= self._next and (self._thread is None or not self._thread.is_alive())

    def postpone(self) -> None:
        """Begin the period anew: another checkpoint of the current state is written."""
        self._next = max(self._next, self._now() + self._period)

    def save(self, step: int, state: Any, policy: Flat, normaliser: Flat, meta: Mapping[str, Any]) -> None:
        """Copy to the host and write in the background, after a write that is under way.

        A failure is reported and counted; the one before then stays.
        """
        self.wait()
        began = self._now()
        items, info = items_of(step, state, policy, normaliser, meta)
        self._thread = threading.Thread(target=self._write, args=(step, items, info, began), name="timed-checkpoint")
        self._thread.start()

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _write(self, step: int, items: dict[str, Flat], info: dict[str, Any], began: float) -> None:
        path = self._dir / str(max(map(int, finished(self._dir)), default=0) + 1)
        try:
            self._dir.mkdir(parents=True, exist_ok=True)
            with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
                checkpointer.save(path, args=orbax_arguments(items, info))
            for name in items:
                read_item(path, name)
        except Exception as error:  # of the disk, of orbax and tensorstore, or what was written does not verify
            self.failed_saves += 1
            shutil.rmtree(path, ignore_errors=True)
            logger.warning(
                f"the timed checkpoint of step {step} could not be written to {self._dir} "
                f"({type(error).__name__}: {error}). Training goes on, and it is tried again after a while. If the "
                "disk is full, free some space."
            )
        else:
            for other in self._dir.iterdir():  # also what a killed learner left unfinished
                if other != path:
                    shutil.rmtree(other, ignore_errors=True)
        finally:
            self._next = began + max(self._period, (self._now() - began) / self._share)

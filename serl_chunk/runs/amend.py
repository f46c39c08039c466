"""Corrections of a run's episodes: appended to its journal, or handed to the learner that holds the run."""

from __future__ import annotations

import fcntl
import threading
from pathlib import Path
from typing import IO

from serl_chunk.runs.amend_requests import PATIENCE_S, request
from serl_chunk.runs.episodes import JOURNAL
from serl_chunk.runs.folder import RUN_LOCK
from serl_chunk.runs.journal_index import LIMITS
from serl_chunk.transport.storage.record_store import RecordStore
from serl_chunk.types import Amend, ConfigError
from serl_chunk.version import version_info

KEEP_S = 20.0  # seconds that the run stays locked after a correction: opening a journal reads all of it


class RunAmender:
    """Appends corrections under the lock of the run and that of its journal. Thread-safe.

    Both locks are held from a correction on until `keep_s` seconds pass without another one. Where a learner holds the
    run, it appends them, and applies them to its replay (`amend_requests`).

    Args:
        patience_s: how long such a learner may take.
    """

    def __init__(self, run: Path, *, keep_s: float = KEEP_S, patience_s: float = PATIENCE_S) -> None:
        self._run, self._keep_s, self._patience_s = run, keep_s, patience_s
        self._mutex = threading.Lock()
        self._opened: tuple[IO[str], RecordStore] | None = None
        self._timer: threading.Timer | None = None

    def amend(self, session: str, actor_id: str, record: Amend) -> None:
        """Write a correction of a closed episode of `session`; it is in the journal when this returns.

        Raises:
            ConfigError: the run's folder cannot be written, or the process that holds the run takes no corrections.
            JournalError: the disk takes no more.
            DataError: the journal cannot be read, or the learner refuses the correction.
        """
        with self._mutex:
            self._stop_timer()
            try:
                if self._opened is None:
                    self._opened = self._open()
                if self._opened is None:
                    request(self._run, session, actor_id, record, self._patience_s)
                    return
                store = self._opened[1]
                store.correct(session, actor_id, record)
                store.journal.sync()
            finally:
                if self._opened is not None:
                    self._timer = threading.Timer(self._keep_s, self.close)
                    self._timer.daemon = True
                    self._timer.start()

    def close(self) -> None:
        """Release the run. A later correction locks it again."""
        with self._mutex:
            self._stop_timer()
            if self._opened is not None:
                lock, store = self._opened
                self._opened = None
                store.close()
                lock.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _open(self) -> tuple[IO[str], RecordStore] | None:
        """Lock the run and open its journal; None where another process holds the run."""
        path = self._run / RUN_LOCK
        try:
            lock = path.open("a")
        except OSError as error:
            text = f"{path}: cannot be locked ({error.strerror}). Labels need a run folder that can be written"
            raise ConfigError(text) from error
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.close()
                return None
            store = RecordStore(self._run / JOURNAL, LIMITS, writer=version_info().text)
            try:
                for _ in store.replay():  # completes the sessions' states, which every segment begins with
                    pass
            except BaseException:
                store.close()
                raise
        except BaseException:
            lock.close()
            raise
        return lock, store

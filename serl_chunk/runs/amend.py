"""Corrections of a run's episodes: appended to its journal, or handed to the learner that holds the run."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from serl_chunk.io import atomic_write, os_faults, os_reason
from serl_chunk.runs.episodes import JOURNAL
from serl_chunk.runs.folder import RUN_LOCK
from serl_chunk.runs.journal_index import LIMITS
from serl_chunk.runs.metrics import METRICS_FILE, MetricsLog
from serl_chunk.transport.storage.record_store import RecordStore
from serl_chunk.types import Amend, ConfigError, DataError, Outcome
from serl_chunk.version import version_info

logger = logging.getLogger(__name__)

FOLDER = "amendments"  # in the run folder
PATIENCE_S = 15.0
_CLAIMED_S = 60.0  # beyond the patience, for a learner whose disk is slow
_POLL_S = 0.02
_REQUEST, _TAKEN, _REFUSED = ".json", ".taken", ".refused"
_MAX_BYTES = 1 << 16
KEEP_S = 20.0  # seconds that the run stays locked after a correction: opening a journal reads all of it


def request(run: Path, session: str, actor_id: str, amend: Amend, patience_s: float = PATIENCE_S) -> None:
    """Hand a correction to the learner that holds `run`, and wait until it is in the journal.

    Raises:
        ConfigError: the folder cannot be written, no learner took it within `patience_s` seconds (it is withdrawn), or
            the one that took it was killed.
        DataError: the learner refuses it, with its reason.
    """
    folder, name = run / FOLDER, f"{time.time_ns():020d}-{secrets.token_hex(4)}"
    content = {"session": session, "actor_id": actor_id, **amend._asdict()}
    file, taken, refused = (folder / f"{name}{suffix}" for suffix in (_REQUEST, _TAKEN, _REFUSED))
    with os_faults(ConfigError, f"{folder}: cannot be used", "Check its permissions"):
        folder.mkdir(exist_ok=True)
        atomic_write(file, json.dumps(content))
        deadline = time.monotonic() + patience_s
        while file.exists() or taken.exists():  # in the order of its way
            if time.monotonic() > deadline and _withdrawn(file):
                text = f"another process holds {run}, and took no label within {patience_s:g} s"
                raise ConfigError(f"{text}. A learner takes none while it evaluates. Try again, or when it has ended")
            if time.monotonic() > deadline + _CLAIMED_S:
                text = f"the learner of {run} claimed the label, and has not confirmed it for {_CLAIMED_S:g} s"
                raise ConfigError(f"{text}. Where it was killed, the next one applies it")
            time.sleep(_POLL_S)
        if refused.exists():
            reason = refused.read_text()
            refused.unlink()
            raise DataError(f"{run}: its learner refuses the label: {reason}")


def _withdrawn(file: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):  # claimed at this moment
        file.unlink()
        return True
    return False


class AmendRequests:
    """The learner's side. One thread polls; answers may come from another.

    `correct`: takes (session, actor id, correction, done) and calls `done` with why it failed, else with "".
    """

    def __init__(self, run: Path, correct: Callable[[str, str, Amend, Callable[[str], None]], None]) -> None:
        self._folder, self._correct = run / FOLDER, correct
        with contextlib.suppress(OSError):
            for path in self._folder.glob(f"*{_TAKEN}"):  # of a learner that was killed
                path.rename(path.with_suffix(_REQUEST))

    def poll(self) -> None:
        """Claim every request that is there, oldest first."""
        try:
            files = sorted(path for path in self._folder.iterdir() if path.suffix == _REQUEST)
        except OSError:  # there was none yet
            return
        for file in files:
            if not file.name.startswith("."):  # of a write that is under way
                self._claim(file)

    def _claim(self, file: Path) -> None:
        taken = file.with_suffix(_TAKEN)
        try:
            file.rename(taken)
            session, actor_id, amend = _parsed(taken)
        except DataError as error:
            self._answer(taken, str(error))
        except OSError as error:  # withdrawn at this moment, or a disk's fault, which the sender sees as silence
            logger.debug("a label was not taken: %s", error)
        else:
            self._correct(session, actor_id, amend, lambda why: self._answer(taken, why))

    def _answer(self, taken: Path, why: str) -> None:
        try:
            if why:
                logger.warning("an operator's label is refused: %s", why)
                atomic_write(taken.with_suffix(_REFUSED), why)
            else:
                logger.info("an operator's label was applied")
            taken.unlink()
        except OSError as error:
            logger.warning("%s cannot be removed: %s", taken, os_reason(error))


def _parsed(file: Path) -> tuple[str, str, Amend]:
    if file.stat().st_size > _MAX_BYTES:
        raise DataError(f"{file.name}: has more than {_MAX_BYTES} bytes")
    try:
        content = json.loads(file.read_text())
        session, actor_id = content.pop("session"), content.pop("actor_id")
        outcome: Any = content.pop("outcome")
        amend = Amend(**content, outcome=None if outcome is None else Outcome(outcome))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise DataError(f"{file.name}: is no correction ({error})") from error
    texts = (session, actor_id, amend.episode_id, amend.outcome_by)
    plain = all(type(text) is str for text in texts) and type(amend.discard) is bool
    reward = amend.reward is None or (type(amend.reward) in (int, float) and abs(amend.reward) < 3e38)
    if not plain or not isinstance(amend.terminated, bool | None) or not reward:
        raise DataError(f"{file.name}: a field has another type than a correction's")
    return session, actor_id, amend


class RunAmender:
    """Appends corrections under the lock of the run and that of its journal. Thread-safe.

    Both locks are held from a correction on until `keep_s` seconds pass without another one. Where a learner holds the
    run, it appends them, and applies them to its replay. `patience_s`: how long such a learner may take.
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
                self._note(f"{actor_id}/{session}", record)
            finally:
                if self._opened is not None:
                    self._timer = threading.Timer(self._keep_s, self.close)
                    self._timer.daemon = True
                    self._timer.start()

    def _note(self, session: str, record: Amend) -> None:
        """Write the correction into the run's metrics, as the learner that holds a run does."""
        if (self._run / METRICS_FILE).exists():
            try:
                with MetricsLog(self._run, wandb_project=None, wandb_name="", config={}) as metrics:
                    metrics.correction(session, record)
            except OSError as error:
                logger.warning("%s: the label is not in its figures (%s)", self._run / METRICS_FILE, os_reason(error))

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
        with contextlib.ExitStack() as undo:
            try:
                lock = undo.enter_context(path.open("a"))
            except OSError as error:
                text = f"{path}: cannot be locked ({error.strerror}). Labels need a run folder that can be written"
                raise ConfigError(text) from error
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            store = RecordStore(self._run / JOURNAL, LIMITS, writer=version_info().text)
            undo.callback(store.close)
            store.find_states()  # which every segment begins with
            undo.pop_all()
        return lock, store

"""Corrections that another process of this machine hands to the learner of a run, as files in the run folder.

A request is `amendments/<name>.json`. The learner claims it by renaming it to `<name>.taken`, and removes that file
once the correction is in its journal and its replay. A refused one leaves its reason in `<name>.refused`. Corrections
set values and add none: a request that a killed learner had claimed is applied by the next one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from serl_chunk.io import atomic_write, os_reason
from serl_chunk.types import Amend, ConfigError, DataError, Outcome

logger = logging.getLogger(__name__)

FOLDER = "amendments"  # in the run folder
PATIENCE_S = 15.0
_CLAIMED_S = 60.0  # beyond the patience, for a learner whose disk is slow
_POLL_S = 0.02
_REQUEST, _TAKEN, _REFUSED = ".json", ".taken", ".refused"
_MAX_BYTES = 1 << 16


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
    try:
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
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be used ({os_reason(error)}). Check its permissions") from error


def _withdrawn(file: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):  # claimed at this moment
        file.unlink()
        return True
    return False


class AmendRequests:
    """The learner's side. One thread polls; answers may come from another.

    Args:
        correct: takes (session, actor id, correction, done) and calls `done` with why it failed, else with "".
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
    if not plain or not isinstance(amend.terminated, bool | None) or not _is_reward(amend.reward):
        raise DataError(f"{file.name}: a field has another type than a correction's")
    return session, actor_id, amend


def _is_reward(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and abs(value) < 3e38)

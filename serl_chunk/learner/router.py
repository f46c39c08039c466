"""Passes actors' records to the replay, and counts the steps and episodes that they add."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from typing import NamedTuple

from serl_chunk.learner.demonstrations import DemonstrationReceiver
from serl_chunk.replay.episode import EpisodeStats
from serl_chunk.replay.episode_builder import Added
from serl_chunk.replay.replay import Replay
from serl_chunk.types import DataError, Episode, Record

logger = logging.getLogger(__name__)


class Received(NamedTuple):
    """Counters at one moment, and the episodes that they cover."""

    env_steps: int  # online steps, those of previous processes included
    position: int  # journal entries that this and all episodes taken so far cover
    episodes: list[EpisodeStats]  # finished since the last call, oldest first
    demonstrations: list[Episode]  # streamed ones that came since the last call


class RecordRouter:
    """Routes records to the replay. One thread inserts; the thread that trains takes what was finished."""

    def __init__(self, replay: Replay) -> None:
        self._replay = replay
        self.demonstrations = DemonstrationReceiver(replay)
        self._received: list[Episode] = []  # demonstrations
        self._changed = threading.Condition()
        self._finished: list[EpisodeStats] = []
        self.position = 0  # journal entries that the counters cover
        self.env_steps = 0
        self._human_steps = 0  # of interventions, that the previous process held
        self.resumed_steps = 0  # online steps of previous processes, whose transitions are gone

    def resume(self, env_steps: int, position: int, human_steps: int = 0) -> None:
        """Count on from a previous process, whose records `refill` may put back.

        `human_steps`: of interventions that it held, also beyond the online partition.
        """
        self._human_steps = human_steps
        self.env_steps = self.resumed_steps = env_steps
        self.position = position

    @property
    def fresh_steps(self) -> int:
        """Online steps whose transitions came to this process, or were put back."""
        return self.env_steps - self.resumed_steps

    def insert(self, session: str, record: Record, position: int | None = None) -> None:
        """Route a record; `position`: entries of the journal, its own included. Raises DataError where it misfits."""
        self._count(*self._insert(session, record), position)

    def _insert(self, session: str, record: Record) -> tuple[Added, Episode | None]:
        if self.demonstrations.takes(session, record):  # not counted as online steps
            return Added(), self.demonstrations.insert(session, record)
        return self._replay.insert(session, record), None

    def close_session(self, session: str, *, gone: bool, position: int | None = None) -> None:
        """Note that an actor fell silent, or is permanently disconnected (`gone`)."""
        self._count(self._close_session(session, gone=gone), None, position)

    def _close_session(self, session: str, *, gone: bool) -> Added:
        if gone:
            self.demonstrations.close_session(session)
        return self._replay.close_session(session, gone=gone)

    def _count(self, added: Added, demonstration: Episode | None, position: int | None) -> None:
        with self._changed:
            self.env_steps += added.steps
            if added.finished is not None:
                self._finished.append(added.finished)
            if demonstration is not None:
                self._received.append(demonstration)
            self.position = self.position if position is None else position
            self._changed.notify()

    def refill(self, records: Iterable[tuple[int, str, Record | None]]) -> int:
        """Put back what a previous process received: (journal entry, session, record), oldest first; returns the steps.

        No record: the session was closed there, perhaps within an episode. What the checkpoint's counters cover fills
        the replay and is not counted again. A record that does not fit (the experiment was changed) is left out.
        Entries that come next are to be numbered from `position` on: it may be beyond the journal's end.
        """
        counted, self.position = self.position, 0
        steps = refused = 0
        for number, session, record in records:
            if number < counted:
                self.position = number + 1
            try:
                if record is None:
                    added = self._close_session(session, gone=True)
                else:
                    added, _ = self._insert(session, record)  # a demonstration was reported when it came
            except DataError as error:
                refused += 1
                if refused == 1:
                    logger.warning("the journal holds a record that does not fit: %s", error)
                continue
            steps += added.steps
            if number < counted:
                self.resumed_steps -= added.steps
            else:
                self._count(added, None, number + 1)
        if refused:
            logger.warning("%d records of the journal were left out", refused)
        if (held := int(self._replay.stats()["replay/human_rows"])) < self._human_steps:
            logger.warning(
                "%d of %d steps of old interventions could not be put back: the journal keeps the newest steps "
                "(transport.journal_bytes keeps more of them)",
                self._human_steps - held, self._human_steps,
            )  # fmt: skip
        if self.position < counted:
            logger.warning(
                "the journal ends at entry %d, the checkpoint covers %d: the records between are missing in the replay",
                self.position, counted,
            )  # fmt: skip
            self.position = counted
        return steps

    def take(self) -> Received:
        """Return the counters and the episodes that were finished since the last call, all of one moment."""
        with self._changed:
            episodes, self._finished = self._finished, []
            demonstrations, self._received = self._received, []
            return Received(self.env_steps, self.position, episodes, demonstrations)

    def wait(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait(seconds)

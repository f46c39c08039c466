"""Inserts actor records into the replay and counts steps and episodes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

from serl_chunk.replay.episode import EpisodeStats
from serl_chunk.replay.replay import Replay
from serl_chunk.types import DataError, Record


class IngestState(NamedTuple):
    """What had come in at one moment."""

    env_steps: int  # online steps, those of earlier lives included
    position: int  # journal entries that this and all episodes taken so far cover
    episodes: list[EpisodeStats]  # that ended since the last time, oldest first


class RecordIngest:
    """Fills the replay and counts. One thread inserts; the thread that trains takes what there is.

    Args:
        make_replay: builds the replay, given what it is to call at the end of every online episode.
        say: prints one line for the operator.
    """

    def __init__(self, make_replay: Callable[[Callable[[EpisodeStats], None]], Replay], say: Callable[[str], None]):
        self._say = say
        self._changed = threading.Condition()
        self._reported: list[EpisodeStats] = []  # by the replay, on its way to `_finished`
        self._finished: list[EpisodeStats] = []
        self.replay = make_replay(self._reported.append)
        self.env_steps = 0
        self._position = 0  # journal entries that the counters cover
        self._human_held = 0  # steps of earlier lives' interventions that outlived the online store
        self.resumed_steps = 0  # online steps of earlier lives, whose transitions are gone

    def resume(self, env_steps: int, position: int, human_held: int) -> None:
        """Count on from an earlier life, whose records `refill` may bring back."""
        self.env_steps = self.resumed_steps = env_steps
        self._position, self._human_held = position, human_held

    @property
    def fresh_steps(self) -> int:
        """Online steps whose transitions came in this life, or were put back."""
        return self.env_steps - self.resumed_steps

    # -- records in, by one thread ---------------------------------------------------------------------------

    def insert(self, session: str, record: Record, position: int | None = None) -> None:
        """Take a record of an actor; raises DataError where it cannot be one.

        `position`: how many journal entries there are, this record's included. A checkpoint says how many of them its
        counters cover.
        """
        steps = self.replay.insert(session, record)
        with self._changed:
            self.env_steps += steps
            self._settle(position)
            self._changed.notify()

    def close_session(self, session: str, *, gone: bool, position: int | None = None) -> None:
        """An actor fell silent, or is gone for good: see Replay.close_session."""
        self.replay.close_session(session, gone=gone)
        with self._changed:
            self._settle(position)

    def _settle(self, position: int | None) -> None:
        self._finished += self._reported
        self._reported.clear()
        self._position = self._position if position is None else position

    def refill(self, records: Iterable[tuple[int, str, Record | None]]) -> int:
        """Put back what a learner before this one received: (journal entry, session, record), oldest first.

        No record: the session was given up there, in the middle of an episode perhaps. What the checkpoint's counters
        cover fills the replay and is not counted again. Returns the steps put back. A record that does not fit (the
        experiment was changed) is left out, and said.
        """
        counted, self._position = self._position, 0
        steps = refused = 0
        for number, session, record in records:
            try:
                steps += self._put_back(session, record, number, counted=number < counted)
            except DataError as error:
                refused += 1
                if refused == 1:
                    self._say(f"WARNING: the journal holds a record that does not fit: {error}")
        if refused:
            self._say(f"WARNING: {refused} records of the journal were left out")
        if self._position < counted:
            self._say(
                f"WARNING: the journal ends at entry {self._position}, the checkpoint has seen {counted}: what lies "
                "between is missing in the replay"
            )
            self._position = counted
        held = int(self.replay.stats()["replay/human_rows"])
        if held < self._human_held:
            self._say(
                f"WARNING: {self._human_held - held} of {self._human_held} steps of old interventions could not be put "
                "back: the journal keeps the newest steps (transport.journal_bytes keeps more of them)"
            )
        return steps

    def _put_back(self, session: str, record: Record | None, number: int, *, counted: bool) -> int:
        if not counted:
            before = self.env_steps
            if record is None:
                self.close_session(session, gone=True, position=number + 1)
            else:
                self.insert(session, record, number + 1)
            return self.env_steps - before
        self._position = number + 1
        covered = 0
        if record is None:
            self.replay.close_session(session, gone=True)
        else:
            covered = self.replay.insert(session, record)
        self.resumed_steps -= covered
        self._reported.clear()
        return covered

    # -- out, to the thread that trains ----------------------------------------------------------------------

    def take(self) -> IngestState:
        """The counters, and the episodes that ended since the last call: of one moment."""
        with self._changed:
            episodes, self._finished = self._finished, []
            return IngestState(self.env_steps, self._position, episodes)

    def wait(self, seconds: float) -> None:
        """Until a record comes in, at most so long."""
        with self._changed:
            self._changed.wait(seconds)

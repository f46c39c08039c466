"""The state machine of a record stream: a session's state and an item give a verdict and the next state."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

from serl_chunk.transport.wire import records
from serl_chunk.transport.wire.records import Item


class Verdict(enum.Enum):
    """The relation of an item to a session's state."""

    NEW = "new"  # it comes next, and belongs to the open episode or needs none
    ORPHAN = "orphan"  # it comes next, and its episode is not open
    DUPLICATE = "duplicate"  # all of its numbers have passed
    GAP = "gap"  # numbers before it are missing


class SessionState(NamedTuple):
    """The progress of a session's stream. The fields are a row of the journal, in this order."""

    session: str
    actor_id: str
    incarnation: int
    expected: int  # next sequence number
    steps: int  # delivered
    steps_offset: int  # steps the actor counts and the learner does not
    open_episode: str | None

    @classmethod
    def from_row(cls, row: Sequence[Any]) -> SessionState:
        """Check a row of a journal. Raises TypeError."""
        state = cls(*row)
        texts = (state.session, state.actor_id, state.open_episode or "")
        if not all(type(x) is str for x in texts) or not all(type(x) is int for x in state[2:6]):
            raise TypeError(f"{row} is no state of a session")
        return state

    def judge(self, item: Item) -> Verdict:
        """Compare an item with this state. Of a NEW or ORPHAN one the numbers below `expected` have passed."""
        if item.first > self.expected:
            return Verdict.GAP
        if item.end <= self.expected:
            return Verdict.DUPLICATE
        follows = item.kind not in (records.STEPS, records.END) or item.episode == self.open_episode
        return Verdict.NEW if follows else Verdict.ORPHAN

    def after(self, item: Item, *, delivered: bool) -> SessionState:
        """Return the state behind a NEW or ORPHAN item. `delivered`: False for one that was journalled only."""
        steps, offset, episode = self.steps, self.steps_offset, self.open_episode
        if item.kind == records.STEPS:
            n = item.end - self.expected
            steps, offset = (steps + n, offset) if delivered else (steps, offset + n)
        elif item.kind == records.BEGIN:
            episode = item.episode
        elif item.kind == records.LOST:
            offset, episode = offset + item.lost_steps, None
        elif item.kind == records.END and delivered:
            episode = None
        return SessionState(*self[:3], item.end, steps, offset, episode)

    def resumed(self, known: SessionState | None) -> SessionState:
        """Return this state for a reader that had come to `known`: after a hole no episode is open."""
        whole = known is not None and known.expected == self.expected
        return self._replace(open_episode=known.open_episode if known and whole else None)

"""What an operator decides on episodes: labels and discards, and what of them can still be undone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from serl_chunk.outcomes.judge import CLASSIFIER, OPERATOR
from serl_chunk.types import Amend, End, Outcome

logger = logging.getLogger(__name__)


class DiscardNotes(Protocol):
    """Takes note of a discard that is not final yet, so that it holds where this process is killed."""

    def note_discard(self, episode_id: str) -> None:
        """Note which episode is to be discarded, in place of the one before; empty: none. Returns at once."""

    @property
    def discard_noted(self) -> bool:
        """Whether the last note is on disk."""


class EpisodeLabels:
    """Labels of the episode under way, and corrections of the one before.

    A label that was given within an episode ends it. A discard is sent when the next episode ends, so that it can be
    undone until then. Meanwhile it is noted in `notes`.
    """

    def __init__(self, amend: Callable[[Amend], object]) -> None:
        self._amend = amend
        self.outcome: Outcome | None = None  # of the episode under way
        self.notes: DiscardNotes | None = None  # None: a discard that was not sent is lost where the process is killed
        self.label, self._noting = "", False  # outcome of the last one, "discarded" or "kept"; whether that was noted
        self.repeats = False  # the next one is to begin from the start state of the last one
        self.asked = False  # the last one waits for a label
        self._discarded = False  # the episode under way
        self._last = ""  # id of the last one ...
        self._labelled = False  # ... which a label ended
        self._classified = False  # ... or a success of the classifier's
        self._pending: str | None = None  # id of the one to discard

    @property
    def shown(self) -> str:
        """The last episode's outcome, or what became of it, for the console."""
        waits = self._noting and self.notes is not None and not self.notes.discard_noted
        return f"{self.label}, not on disk yet" if waits else self.label

    @property
    def discards_last(self) -> bool:
        return self._pending is not None and self._pending == self._last

    def begin(self) -> None:
        self.outcome, self._discarded, self.repeats = None, False, False

    def discard(self) -> None:
        self._discarded = True

    def discard_last(self) -> None:
        if self._last:
            self._pending = self._last
            self._show("discarded", noted=True)
            self._note(self._last)

    def ask(self) -> None:
        """Let a label count for the last episode, which ended without one, until `answer`."""
        self.asked, self.outcome = True, None

    def answer(self) -> Outcome | None:
        """Return the label since `ask`, or None. It can be undone as that of an episode under way."""
        self.asked = False
        if self.outcome is not None:
            self._labelled = True
            self._show(self.outcome.value)
        return self.outcome

    def undo(self) -> None:
        """Undo the last discard, or else the last label.

        An undone label leaves an episode without an outcome; a success of the classifier's becomes a failure.
        """
        if self._pending is not None:
            logger.info(f"episode {self._pending} is kept")
            self._pending = None
            self._show("kept", noted=True)
            self._note("")
        elif self._labelled:
            self._amend(Amend(self._last, Outcome.UNKNOWN, OPERATOR, terminated=False, reward=0.0))
            logger.info(f"the label of episode {self._last} is undone")
            self._labelled = False
            self._show(Outcome.UNKNOWN.value)
        elif self._classified:  # its frames are what the next classifier learns not to take for a success
            self._amend(Amend(self._last, Outcome.FAILURE, OPERATOR, terminated=False, reward=0.0))
            logger.info(f"the classifier's success of episode {self._last} is a failure")
            self._classified = False
            self._show(Outcome.FAILURE.value)

    def ended(self, end: End) -> None:
        """Send what is pending of the episode before this one, which has ended."""
        self.send()
        self._last, self._labelled = end.episode_id, self.outcome is not None
        self._show(end.outcome.value)
        self._classified = end.outcome_by == CLASSIFIER
        if self._discarded:
            self.discard_last()

    def forget(self) -> None:
        """Send a discard that was not undone. The last episode cannot be corrected any more."""
        self.send()
        self._last, self._labelled = "", False

    def send(self) -> None:
        if self._pending is not None:
            self._amend(Amend(self._pending, discard=True))
            self._pending = None
            self._note("")

    def _show(self, text: str, *, noted: bool = False) -> None:
        self.label, self._noting = text, noted

    def _note(self, episode_id: str) -> None:
        if self.notes is not None:
            self.notes.note_discard(episode_id)

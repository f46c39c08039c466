"""What an operator decides on episodes: labels and discards, and what of them can still be undone."""

from __future__ import annotations

import logging
from collections.abc import Callable

from serl_chunk.outcomes.judge import CLASSIFIER, OPERATOR
from serl_chunk.types import Amend, End, Outcome

logger = logging.getLogger(__name__)


class EpisodeLabels:
    """Labels of the episode under way, and corrections of the one before.

    A label that was given within an episode ends it. A discard is sent when the next episode ends, so that it can be
    undone until then.

    Args:
        amend: sends a correction.
    """

    def __init__(self, amend: Callable[[Amend], object]) -> None:
        self._amend = amend
        self.outcome: Outcome | None = None  # of the episode under way
        self.shown = ""  # of the last one, for the console
        self.repeats = False  # the next one is to begin from the start state of the last one
        self.asked = False  # the last one waits for a label
        self._discarded = False  # the episode under way
        self._last = ""  # id of the last one ...
        self._labelled = False  # ... which a label ended
        self._classified = False  # ... or a success of the classifier's
        self._pending: str | None = None  # id of the one to discard

    @property
    def discards_last(self) -> bool:
        """Whether the last episode is to be discarded."""
        return self._pending is not None and self._pending == self._last

    def begin(self) -> None:
        """Begin an episode."""
        self.outcome, self._discarded, self.repeats = None, False, False

    def discard(self) -> None:
        """Discard the episode under way."""
        self._discarded = True

    def discard_last(self) -> None:
        """Discard the last episode."""
        if self._last:
            self._pending = self._last
            self.shown = "discarded"

    def ask(self) -> None:
        """Let a label count for the last episode, which ended without one, until `answer`."""
        self.asked, self.outcome = True, None

    def answer(self) -> Outcome | None:
        """Return the label since `ask`, or None. It can be undone as that of an episode under way."""
        self.asked = False
        if self.outcome is not None:
            self._labelled, self.shown = True, self.outcome.value
        return self.outcome

    def undo(self) -> None:
        """Undo the last discard, or else the last label.

        An undone label leaves an episode without an outcome; a success of the classifier's becomes a failure.
        """
        if self._pending is not None:
            logger.info(f"episode {self._pending} is kept")
            self._pending, self.shown = None, "kept"
        elif self._labelled:
            self._amend(Amend(self._last, Outcome.UNKNOWN, OPERATOR, terminated=False, reward=0.0))
            logger.info(f"the label of episode {self._last} is undone")
            self._labelled, self.shown = False, Outcome.UNKNOWN.value
        elif self._classified:  # its frames are what the next classifier learns not to take for a success
            self._amend(Amend(self._last, Outcome.FAILURE, OPERATOR, terminated=False, reward=0.0))
            logger.info(f"the classifier's success of episode {self._last} is a failure")
            self._classified, self.shown = False, Outcome.FAILURE.value

    def ended(self, end: End) -> None:
        """Send what is pending of the episode before this one, which has ended."""
        self.send()
        self._last, self._labelled, self.shown = end.episode_id, self.outcome is not None, end.outcome.value
        self._classified = end.outcome_by == CLASSIFIER
        if self._discarded:
            self.discard_last()

    def forget(self) -> None:
        """Send a discard that was not undone. The last episode cannot be corrected any more."""
        self.send()
        self._last, self._labelled = "", False

    def send(self) -> None:
        """Send a discard that was not undone."""
        if self._pending is not None:
            self._amend(Amend(self._pending, discard=True))
            self._pending = None

"""The texts of tasks that a replay has seen, each held once."""

from __future__ import annotations

import numpy as np

from serl_chunk.data.prompts import Prompts, RowTexts
from serl_chunk.types import Begin, ConfigError, DataError


class TaskTable:
    """Numbers texts in the order in which they come; a text keeps its number for as long as the replay exists.

    An episode without a text has that of the experiment. The caller of `number` and `texts_at` holds the replay's lock.

    Args:
        prompts: that the texts must fit.
        own: the experiment's text.
    """

    def __init__(self, prompts: Prompts, own: str) -> None:
        self._prompts, self._own = prompts, own
        self._numbers: dict[str, int] = {}
        self._texts: list[str] = []

    def __len__(self) -> int:
        return len(self._texts)

    def text_of(self, begin: Begin) -> str:
        return begin.task or self._own

    def check(self, begin: Begin) -> None:
        """Raise DataError where the text of an episode is too long for a prompt."""
        try:
            self._prompts.check(self.text_of(begin))
        except ConfigError as error:
            raise DataError(f"episode {begin.episode_id}: {error}") from error

    def number(self, begin: Begin) -> int:
        """Return the number of an episode's text, a new one for a new text. Raises DataError as `check`."""
        self.check(begin)
        text = self.text_of(begin)
        if text not in self._numbers:
            self._numbers[text] = len(self._texts)
            self._texts.append(text)
        return self._numbers[text]

    def texts_at(self, numbers: np.ndarray) -> RowTexts:
        """Return the texts `numbers` int32[B]. Texts are never taken out: it stays valid without the lock."""
        return RowTexts(self._texts, numbers)

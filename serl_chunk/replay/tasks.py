"""The texts of tasks that a replay has seen, each held once, with their prompts."""

from __future__ import annotations

import numpy as np

from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.data.prompts import Prompts, make_prompts
from serl_chunk.types import PROMPT, PROMPT_MASK, Begin, ConfigError, DataError


class TaskTable:
    """Numbers texts in the order in which they come; a text keeps its number for as long as the replay exists.

    An episode without a text has that of the experiment. The caller of `number` and `prompts_at` holds the replay's
    lock.

    Args:
        own: the experiment's text.
    """

    def __init__(self, prompts: Prompts, own: str) -> None:
        self._prompts, self._own = prompts, own
        self._numbers: dict[str, int] = {}
        self._tokens = np.zeros((1, prompts.length), np.int32)
        self._given = np.zeros((1, prompts.length), np.bool_)

    def __len__(self) -> int:
        return len(self._numbers)

    def text_of(self, begin: Begin) -> str:
        return begin.task or self._own

    def check(self, begin: Begin) -> None:
        """Raise DataError where the text of an episode is too long for a prompt."""
        try:
            self._prompts(self.text_of(begin))
        except ConfigError as error:
            raise DataError(f"episode {begin.episode_id}: {error}") from error

    def number(self, begin: Begin) -> int:
        """Return the number of an episode's text, a new one for a new text. Raises DataError as `check`."""
        self.check(begin)
        text, n = self.text_of(begin), len(self._numbers)
        number = self._numbers.setdefault(text, n)
        if number == n:
            if n == len(self._tokens):
                self._tokens, self._given = (np.concatenate([a, np.zeros_like(a)]) for a in (self._tokens, self._given))
            self._tokens[n], self._given[n] = self._prompts(text)
        return number

    def prompts_at(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """Return the entries of an observation for texts `numbers` int32[B]: fresh int32[B, L] and bool[B, L]."""
        return {PROMPT: self._tokens[numbers], PROMPT_MASK: self._given[numbers]}


def task_table(config: ExperimentConfig) -> TaskTable | None:
    """Return an empty table; None where the agent reads no language. Raises ConfigError as `make_prompts`."""
    prompts = make_prompts(config)
    return None if prompts is None else TaskTable(prompts, config.robot.task)

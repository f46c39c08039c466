"""Texts of tasks as the tokens that an agent reads: tokenizers, and prompts of one length."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.types import ConfigError

PADDING = 0  # the token of places without one, in every tokenizer
_REMEMBERED = 1024  # texts


class Tokenizer(Protocol):
    """Makes tokens of a text. Another one needs a name in `config.language`, its vocabulary there, and `TOKENIZERS`."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of `text`, each above PADDING. Raises ConfigError where it is no valid text."""

    def digest(self) -> str:
        """Return hex digits that change when any text gets other tokens."""


class ByteTokenizer:
    """A begin token, 1, and the bytes of the text in UTF-8, each plus 2. Nothing is normalised."""

    BEGIN, FIRST = 1, 2

    def encode(self, text: str) -> list[int]:
        try:
            return [self.BEGIN, *(self.FIRST + byte for byte in text.encode())]
        except UnicodeEncodeError as error:
            raise ConfigError(f"the task {text!r} is no valid text ({error.reason}). Write it in UTF-8") from error

    def digest(self) -> str:
        return hashlib.sha256(f"utf-8 {PADDING} {self.BEGIN} {self.FIRST}".encode()).hexdigest()[:16]


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {"bytes": ByteTokenizer}


class RowTexts(NamedTuple):
    """The texts of B rows: row k has `texts[numbers[k]]`."""

    texts: Sequence[str]
    numbers: np.ndarray  # int[B]


class Prompts:
    """Makes the prompts of texts, and remembers them; safe to call from any thread.

    Every method is given the normalised state as well, for prompts that hold it. These hold the text alone.

    Args:
        length: L, the tokens of a prompt.
    """

    def __init__(self, tokenizer: Tokenizer, length: int) -> None:
        self.length = length
        self._tokenizer = tokenizer
        self._remembered = functools.lru_cache(_REMEMBERED)(self._made)

    def __call__(self, text: str, state: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens int32[L] of `text`, 0 behind its last one, and which are its own bool[L]; read-only.

        Raises ConfigError where it has more than L tokens. `state`: normalised, float32[S].
        """
        return self._remembered(text)

    def of_rows(self, texts: RowTexts, state: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return fresh tokens int32[B, L] and masks bool[B, L] of rows with normalised states float32[B, S]."""
        different, which = np.unique(texts.numbers, return_inverse=True)
        made = [self(texts.texts[number]) for number in different]
        tokens, given = (np.stack(part) for part in zip(*made, strict=True))
        return tokens[which], given[which]

    def check(self, text: str) -> None:
        """Raise ConfigError where `text` cannot be a prompt."""
        self(text)

    def _made(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        tokens = self._tokenizer.encode(text)
        if len(tokens) > self.length:
            raise ConfigError(
                f"the task {text!r} has {len(tokens)} tokens, a prompt has {self.length} at most. Shorten the text, or "
                f"set agent.language.length={len(tokens)}",
                parameter="agent.language.length",
            )
        prompt = np.full(self.length, PADDING, np.int32)
        prompt[: len(tokens)] = tokens
        mask = np.arange(self.length) < len(tokens)
        for array in (prompt, mask):
            array.flags.writeable = False
        return prompt, mask

    def digest(self) -> str:
        """Return the digest of the tokenizer; the length is compared as a setting."""
        return self._tokenizer.digest()


def make_prompts(config: ExperimentConfig) -> Prompts | None:
    """Return the prompts of an experiment's agent, None where it reads no language.

    Raises ConfigError where the experiment's own task (`robot.task`) is too long for one.
    """
    language = config.agent.language
    if not language.reads:
        return None
    prompts = Prompts(TOKENIZERS[language.tokenizer](), language.length)
    prompts.check(config.robot.task)
    return prompts


def tokens_digest(config: ExperimentConfig) -> str:
    """Return the digest of the agent's tokenizer, for the handshake; empty where it reads no language."""
    prompts = make_prompts(config)
    return "" if prompts is None else prompts.digest()

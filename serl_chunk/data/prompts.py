"""Texts of tasks as the tokens that an agent reads: tokenizers, formats and prompts."""

from __future__ import annotations

import functools
import hashlib
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from serl_chunk.config.agents.base import AgentConfig
from serl_chunk.config.agents.language import PROMPT_BLOCK, WHERE_PI0_HAS_IT
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.fields import value_at
from serl_chunk.types import ConfigError

PADDING = 0  # the token of places without one, in every tokenizer
_REMEMBERED = 4096  # texts, or texts with states


class Tokenizer(Protocol):
    """Makes tokens of a text. Another one needs a name in `config.language`, its vocabulary there, and `TOKENIZERS`."""

    def encode(self, text: str, *, begin: bool = True) -> list[int]:
        """Return the tokens of `text`, after a begin token or not. Raises ConfigError where it is no valid text."""

    def digest(self) -> str:
        """Return hex digits that change when any text gets other tokens."""


class ByteTokenizer:
    """A begin token, 1, and the bytes of the text in UTF-8, each plus 2. Nothing is normalised."""

    BEGIN, FIRST = 1, 2

    def encode(self, text: str, *, begin: bool = True) -> list[int]:
        return [*([self.BEGIN] if begin else []), *(self.FIRST + byte for byte in _bytes_of(text))]

    def digest(self) -> str:
        return hashlib.sha256(f"utf-8 {PADDING} {self.BEGIN} {self.FIRST}".encode()).hexdigest()[:16]


class SentencePieceTokenizer:
    """The pieces of a sentencepiece model after its begin token.

    Raises ConfigError without the package, for a file that is missing or no such model, and for more than `vocabulary`
    pieces.

    Args:
        file: of the model.
        vocabulary: rows of the table that tokens are looked up in.
    """

    def __init__(self, file: str, vocabulary: int) -> None:
        try:
            sentencepiece: Any = importlib.import_module("sentencepiece")
        except ImportError as error:
            raise ConfigError(
                f"agent.language.tokenizer=sentencepiece needs sentencepiece, which cannot be imported ({error}): "
                "pip install 'serl-chunk[pi0]'"
            ) from error
        fault = ""
        cause: Exception | None = None
        try:
            model = Path(file).expanduser().read_bytes()
            self._pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
            if self._pieces.bos_id() < 0:
                fault = "has no begin token, which prompts start with. Use another model"
        except OSError as error:
            remedy = "Copy the tokenizer there, or set agent.language.model to its file"
            fault, cause = f"cannot be read ({error.strerror}). {remedy}", error
        except RuntimeError as error:
            fault, cause = f"is no sentencepiece model ({error}). Copy the tokenizer anew", error
        if fault:
            raise ConfigError(f"{file} {fault}; {WHERE_PI0_HAS_IT}", parameter="agent.language.model") from cause
        if (pieces := self._pieces.vocab_size()) > vocabulary:
            raise ConfigError(
                f"{file} has {pieces} pieces, agent.pi0.vocabulary is {vocabulary}. Set agent.pi0.vocabulary={pieces}, "
                "or agent.language.model to the file that the checkpoint was trained with",
                parameter="agent.pi0.vocabulary",
            )
        self._digest = hashlib.sha256(model).hexdigest()[:16]

    def encode(self, text: str, *, begin: bool = True) -> list[int]:
        _bytes_of(text)
        tokens: list[int] = self._pieces.encode(text, add_bos=begin)
        return tokens

    def digest(self) -> str:
        return self._digest


def _bytes_of(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"the task {text!r} is no valid text ({error.reason}). Write it in UTF-8") from error


TOKENIZERS: dict[str, Callable[[AgentConfig], Tokenizer]] = {
    "bytes": lambda agent: ByteTokenizer(),
    "sentencepiece": lambda agent: SentencePieceTokenizer(agent.language.model, value_at(agent, "pi0.vocabulary")),
}

# -- formats -------------------------------------------------------------------------------------------------

_BINS = 256
_EDGES = np.linspace(-1, 1, _BINS + 1)[:-1]


class PlainFormat:
    """The tokens of the text as it is, in prompts of one length."""

    block = 0  # lengths of prompts are multiples of it; 0: all have the most
    reads_state = False

    def tokens(self, tokenizer: Tokenizer, text: str, bins: Sequence[int]) -> list[int]:
        """Return the tokens of `text` with the state's numbers `bins`, which are empty without `reads_state`."""
        return tokenizer.encode(text)


class Pi0Format(PlainFormat):
    """pi0's: the text in one line without underscores, then the tokens of a line's end."""

    def __init__(self, block: int = PROMPT_BLOCK) -> None:
        self.block = block

    def tokens(self, tokenizer: Tokenizer, text: str, bins: Sequence[int]) -> list[int]:
        # Apart, as openpi has it: pieces may span the end of the text otherwise.
        return [*tokenizer.encode(_one_line(text)), *tokenizer.encode("\n", begin=False)]


class Pi05Format(Pi0Format):
    """pi0.5's: the text and the normalised state, whose numbers are bins of [-1, 1]."""

    reads_state = True

    def tokens(self, tokenizer: Tokenizer, text: str, bins: Sequence[int]) -> list[int]:
        return tokenizer.encode(f"Task: {_one_line(text)}, State: {' '.join(map(str, bins))};\nAction: ")


def _one_line(text: str) -> str:
    return text.strip().replace("_", " ").replace("\n", " ")


def bins_of(state: np.ndarray) -> np.ndarray:
    """Return which of 256 bins of [-1, 1] each number is in, int[...]: -1 below, the last one above."""
    return np.digitize(state, _EDGES) - 1


# -- prompts -------------------------------------------------------------------------------------------------


class RowTexts(NamedTuple):
    """The texts of B rows: row k has `texts[numbers[k]]`."""

    texts: Sequence[str]
    numbers: np.ndarray  # int32[B]


class Prompts:
    """Makes the prompts of texts, and remembers them; safe to call from any thread.

    Every method is given the normalised state as well, for formats that hold it.

    Args:
        length: L, the most tokens of a prompt.
        format: what a prompt is made of. With its `block`, prompts have P <= L tokens: as many as the longest of a
            call needs with any state, rounded up to the block. Else P is L.
        state_dim: S.
    """

    def __init__(
        self, tokenizer: Tokenizer, length: int, format: PlainFormat | None = None, state_dim: int = 0
    ) -> None:
        self.length = length
        self._tokenizer, self._format = tokenizer, format or PlainFormat()
        # A state's numbers have three digits at most, and a digit more is no token less.
        self._longest_state = (_BINS - 1,) * state_dim if self._format.reads_state else ()
        self._remembered = functools.lru_cache(_REMEMBERED)(self._made)
        self._most = functools.lru_cache(_REMEMBERED)(self._count)

    def __call__(self, text: str, state: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens int32[P] of `text`, 0 behind its last one, and which are its own bool[P]; read-only.

        Raises ConfigError where it has more than L tokens. `state`: normalised, float32[S].
        """
        return self._remembered(text, self._bins(state))

    def of_rows(self, texts: RowTexts, state: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return fresh tokens int32[B, P] and masks bool[B, P] of rows with normalised states float32[B, S]."""
        if self._format.reads_state:
            which = np.arange(len(texts.numbers))
            bins = [self._bins(row) for row in _required(state)]
            made = [self._remembered(texts.texts[n], row) for n, row in zip(texts.numbers, bins, strict=True)]
        else:
            different, which = np.unique(texts.numbers, return_inverse=True)
            made = [self._remembered(texts.texts[number], ()) for number in different]
        slots = max((len(tokens) for tokens, _ in made), default=self.length)
        tokens, given = np.full((len(made), slots), PADDING, np.int32), np.zeros((len(made), slots), np.bool_)
        for row, (own, mask) in enumerate(made):
            tokens[row, : len(own)], given[row, : len(own)] = own, mask
        return tokens[which], given[which]

    def check(self, text: str) -> None:
        """Raise ConfigError where `text` cannot be a prompt, with some state of S numbers."""
        self._most(text)

    def _bins(self, state: np.ndarray | None) -> tuple[int, ...]:
        return tuple(bins_of(_required(state)).tolist()) if self._format.reads_state else ()

    def _count(self, text: str) -> int:
        """Return the most tokens of `text` with any state. Raises ConfigError for more than L."""
        return len(self._tokens(text, self._longest_state))

    def _made(self, text: str, bins: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        tokens = self._tokens(text, bins)
        slots = self.length
        if block := self._format.block:
            slots = min(slots, -(-max(self._most(text), len(tokens)) // block) * block)
        prompt = np.full(slots, PADDING, np.int32)
        prompt[: len(tokens)] = tokens
        mask = np.arange(slots) < len(tokens)
        for array in (prompt, mask):
            array.flags.writeable = False
        return prompt, mask

    def _tokens(self, text: str, bins: tuple[int, ...]) -> list[int]:
        tokens = self._format.tokens(self._tokenizer, text, bins)
        if (count := len(tokens)) > self.length:
            of = f"the task {text!r}" + (" with the robot's state" if self._format.reads_state else "")
            raise ConfigError(
                f"{of} has {count} tokens, a prompt has {self.length} at most. Shorten the text, or set "
                f"agent.language.length={count}",
                parameter="agent.language.length",
            )
        return tokens

    def digest(self) -> str:
        """Return the digest of the tokenizer; the length and the format are compared as settings."""
        return self._tokenizer.digest()


def _required(state: np.ndarray | None) -> np.ndarray:
    if state is None:
        raise ValueError("this format's prompts hold the normalised state: pass it")
    return state


def make_prompts(config: ExperimentConfig, state_dim: int = 0) -> Prompts | None:
    """Return the prompts of an experiment's agent, None where it reads no language.

    Raises ConfigError where one of the experiment's tasks (`robot.tasks`) is too long, and for a file of tokens.
    `state_dim`: S, for prompts that hold the state; 0 where the robot is not known yet and only the text is checked.
    """
    agent = config.agent
    if not agent.language.reads:
        return None
    form = PlainFormat()
    if value_at(agent, "policy") == "pi0":
        pi0 = value_at(agent, "pi0")
        form = (Pi05Format if pi0.reads_bins else Pi0Format)(0 if pi0.published else PROMPT_BLOCK)
    prompts = Prompts(TOKENIZERS[agent.language.tokenizer](agent), agent.language.length, form, state_dim)
    for text in config.robot.tasks:
        prompts.check(text)
    return prompts


def tokens_digest(config: ExperimentConfig) -> str:
    """Return the digest of the agent's tokenizer, for the handshake; empty where it reads no language."""
    prompts = make_prompts(config)
    return "" if prompts is None else prompts.digest()

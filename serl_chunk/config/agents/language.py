"""Settings of the language that agents read."""

from __future__ import annotations

import dataclasses
from typing import Literal

from serl_chunk.config.fields import Group, Requirement, acting, needs, require, setting

Tokenizer = Literal["none", "bytes", "sentencepiece"]
VOCABULARY: dict[Tokenizer, int] = {"none": 0, "bytes": 258, "sentencepiece": 0}
"""Different tokens of each tokenizer of `data.prompts`, the padding included; 0 where a file decides."""
PROMPT_BLOCK = 16  # pi0's prompts have multiples of it: few programs are compiled, few empty slots computed
WHERE_PI0_HAS_IT = (
    "pi0's is paligemma_tokenizer.model: openpi reads it from gs://big_vision/paligemma_tokenizer.model and keeps it "
    "under ~/.cache/openpi/big_vision/"
)

_TOKENIZER = "agent.language.tokenizer"
_READ = Requirement("agent.language.tokenizer other than none", lambda c: c.agent.language.reads)


@dataclasses.dataclass(frozen=True)
class LanguageConfig(Group, path="agent.language."):
    """How the text of an episode's task becomes an input of the agent."""

    tokenizer: Tokenizer = acting(
        "none", "tokens of the task's text: UTF-8 bytes, or a sentencepiece model's; none: the agent reads no language"
    )
    length: int = acting(48, "tokens that a prompt may have, its begin token included", least=2, requires=_READ)
    model: str = setting(
        "", "file of the sentencepiece model; sides compare its digest", requires=needs(_TOKENIZER, "sentencepiece")
    )

    def _check(self) -> None:
        require(
            bool(self.model) or self.tokenizer != "sentencepiece",
            "agent.language.model",
            f"empty, and {_TOKENIZER}=sentencepiece reads it. Set it to the file of a sentencepiece model; "
            f"{WHERE_PI0_HAS_IT}.",
        )

    @property
    def reads(self) -> bool:
        return self.tokenizer != "none"

    @property
    def vocabulary(self) -> int:
        """Different tokens, the padding included; 0 where a file decides."""
        return VOCABULARY[self.tokenizer]

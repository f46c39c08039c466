"""Settings of the language that agents read."""

from __future__ import annotations

import dataclasses
from typing import Literal

from serl_chunk.config.fields import Group, Requirement, acting

Tokenizer = Literal["none", "bytes"]
VOCABULARY: dict[Tokenizer, int] = {"none": 0, "bytes": 258}
"""Different tokens of each tokenizer of `data.prompts`, the padding included."""

_READ = Requirement("agent.language.tokenizer other than none", lambda c: c.agent.language.reads)


@dataclasses.dataclass(frozen=True)
class LanguageConfig(Group, path="agent.language."):
    """How the text of an episode's task becomes an input of the agent."""

    tokenizer: Tokenizer = acting("none", "tokens of the task's text (UTF-8 bytes); none: the agent reads no language")
    length: int = acting(48, "tokens that a text may have, its begin token included", least=2, requires=_READ)

    @property
    def reads(self) -> bool:
        """Return whether the agent reads language."""
        return self.tokenizer != "none"

    @property
    def vocabulary(self) -> int:
        return VOCABULARY[self.tokenizer]

"""Checks that configuration classes share."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from typing import Any, Literal

from serl_chunk.types import ConfigError


def require(condition: bool, message: str) -> None:
    """Raise ConfigError(message) unless `condition`."""
    if not condition:
        raise ConfigError(message)


def choices_in_words(values: Sequence[Any]) -> str:
    """What a field may hold, for a message; an empty text, which would be invisible, is `nothing`."""
    named = ", ".join(str(v) for v in values if v != "")
    return f"{named}, or nothing" if "" in values else named


def require_choices(config: Any, where: str) -> None:
    """Raise ConfigError for a field annotated `Literal` that holds none of its values.

    Only type checkers look at annotations, and code that asks `x == "a"` takes a misspelt "a" for the other choice.
    `where` comes before the field's name in the message, for example `agent.critic.`.
    """
    for name, hint in typing.get_type_hints(type(config)).items():
        if typing.get_origin(hint) is Literal:
            value, valid = getattr(config, name), typing.get_args(hint)
            require(value in valid, f"{where}{name} must be one of {choices_in_words(valid)}, got {value!r}")


def require_widths(name: str, value: tuple[int, ...]) -> None:
    """Raise ConfigError unless `value` lists at least one positive width."""
    require(
        len(value) >= 1 and all(v >= 1 for v in value), f"{name} must list at least one positive width, got {value}"
    )

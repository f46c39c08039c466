"""Saved states of the fake environments: where an episode may begin, and the generator of later start states."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

from serl_chunk.types import DataError

State = TypeVar("State")


def given_start(options: dict[str, Any] | None, kind: type[State]) -> State | None:
    """The saved state in a reset's `options={"start": state}`; None where none is given.

    Raises DataError where it is not a `kind`.
    """
    start = (options or {}).get("start")
    if start is not None and not isinstance(start, kind):
        raise DataError(f'options["start"] must be a {kind.__name__} from save_state(), got {type(start).__name__}')
    return start


def generator_at(state: dict[str, Any]) -> np.random.Generator:
    """A generator that goes on from `state`, which one of gymnasium's (PCG64) was in."""
    generator = np.random.Generator(np.random.PCG64())
    generator.bit_generator.state = state
    return generator

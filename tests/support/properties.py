"""How many examples a property is tried on."""

from __future__ import annotations

from hypothesis import settings

FULL = 100  # examples for which the tests give theirs: the profile `default` has 30, `thorough` 1,000


def examples(full: int) -> int:
    """Return `full`, scaled as the profile says that is in use."""
    return full * settings().max_examples // FULL

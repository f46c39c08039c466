"""How many examples a property is tried on."""

from __future__ import annotations

from hypothesis import settings

AT_DEFAULT = 100  # examples in the profile `default` of tests/conftest.py; `thorough` has ten times as many


def examples(default: int) -> int:
    """Return `default`, scaled as the profile says that is in use."""
    return default * settings().max_examples // AT_DEFAULT

"""Most of these tests' time is compilation: they ask for less of it."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def few_optimisations() -> Iterator[None]:
    """Compile quickly rather than well; what is computed stays the same."""
    before = jax.config.expected_value("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)

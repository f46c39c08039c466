"""For folders whose tests spend most of their time on compilation: they ask for less of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest


def mark(items: list[pytest.Item], conftest: str) -> None:
    """Mark every test of the folder of `conftest`."""
    for item in items:
        if Path(conftest).parent in item.path.parents:
            item.add_marker("compiles")


@pytest.fixture(scope="module", autouse=True)
def few_optimisations() -> Iterator[None]:
    """Compile quickly rather than well; what is computed stays the same."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)

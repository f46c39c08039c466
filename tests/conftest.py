"""What every test module shares."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SLOW = 1800  # seconds until a slow test is given up, where it does not say itself
KEPT = 2.5e9  # bytes; what is compiled is kept for the next modules up to here


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The time limit of pyproject.toml is for tests that are not slow."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW))


@pytest.fixture(scope="module", autouse=True)
def _bounded_memory() -> Iterator[None]:
    """A process forgets what JAX compiled once it is large: four of them would fill a machine of 16 GB otherwise."""
    yield
    statm = Path("/proc/self/statm")
    if "jax" in sys.modules and statm.exists() and int(statm.read_text().split()[1]) * 4096 > KEPT:
        sys.modules["jax"].clear_caches()
        gc.collect()

from __future__ import annotations

import compiles
import pytest

few_optimisations = compiles.few_optimisations


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    compiles.mark(items, __file__)

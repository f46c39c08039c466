"""Reinforcement learning for real robots in action chunks, with a human in the loop.

The names in `__init__.pyi` are imported on first use, so that `import serl_chunk` loads neither numpy nor JAX, and a
robot PC needs no JAX.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

_MODULES = {
    alias.name: node.module
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text()).body
    if isinstance(node, ast.ImportFrom) and node.module
    for alias in node.names
}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    """Import an exported name on first use (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Names that a package exports, which are imported on first use (PEP 562). Its stub `__init__.pyi` is their table."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from typing import Any, Callable, List, Tuple


def exported(package: str, init: str) -> Tuple[List[str], Callable[[str], Any], Callable[[], List[str]]]:
    """Return `__all__`, `__getattr__` and `__dir__` of a package, whose `__init__.py` is the file `init`."""
    modules = {
        alias.name: node.module
        for node in ast.parse(Path(init).with_suffix(".pyi").read_text()).body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return sorted(modules), load, lambda: sorted({*vars(sys.modules[package]), *modules})

"""Makes the driver, cameras and input devices that a robot's file names, with the options that it sets."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import sys
from pathlib import Path
from typing import Any, Callable, Dict, Mapping, NamedTuple, Optional, Sequence

from serl_chunk_robot.errors import ConfigError
from serl_chunk_robot.robot_file.ranges import check_options
from serl_chunk_robot.robot_file.toml_file import Table, unknown


class Source(NamedTuple):
    """What a file names."""

    path: Path  # of the file
    driver: str  # a built-in name, or FILE.py:Class, relative to the file's folder
    options: Dict[str, Any]  # its arguments
    key: str  # the file's key that names it, in errors
    table: str  # the table that holds its options

    @classmethod
    def of(cls, table: Table, own: Sequence[str], built_in: Mapping[str, str], kind: str) -> Source:
        """Read a table of a camera or device: its keys but for `own` are options. Raises ConfigError."""
        options = {key: value for key, value in table.values.items() if key not in own}
        for key, value in options.items():
            try:
                json.dumps(value)
            except TypeError:  # a date: options travel to a process as JSON
                raise table.wrong(key, "a text, a number, true or false, or a list or table of these") from None
        source = cls(table.file, table.text("driver"), options, table.dotted("driver"), table.name)
        if source.driver in built_in:
            check_options(table, kind)
        return source

    def failed(self, what: str, error: Optional[Exception] = None) -> ConfigError:
        why = "" if error is None else f" ({type(error).__name__}: {error})"
        return ConfigError(f"{self.driver} in {self.path}: {what}{why}", parameter=self.key)


def make(source: Source, built_in: Mapping[str, str], methods: Sequence[str]) -> Any:
    """Make what a file names, with its options as arguments; opens nothing.

    `built_in`: name -> module and what makes it; `methods`: that it must have. Raises ConfigError: with the driver and
    what failed: the file, its import, the class, an option, a missing method.
    """
    made_by = maker(source, built_in)
    try:
        made = made_by(**source.options)
    except Exception as e:  # of a lab's code
        raise source.failed("cannot be made", e) from e
    missing = [name for name in methods if not callable(getattr(made, name, None))]
    if missing:
        raise source.failed("lacks the methods {}".format(", ".join(missing)))
    return made


def maker(source: Source, built_in: Mapping[str, str]) -> Callable[..., Any]:
    """Return what makes it, a class or a function, whose arguments the file's options are. Raises ConfigError."""
    made_by = _import(source, built_in)
    parameters = inspect.signature(made_by).parameters.values()
    if not any(p.kind == p.VAR_KEYWORD for p in parameters):
        names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        for key in source.options:
            if key not in names:
                what = f"unknown option of {source.driver} ({source.options[key]!r} in {source.path})"
                raise unknown(f"{source.table}.{key}", key, names, what)
    for p in parameters:
        needed = p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        if needed and p.name not in source.options:
            what = f"missing in {source.path}, and {source.driver} needs it"
            raise ConfigError(what, parameter=f"{source.table}.{p.name}")
    return made_by


def _import(source: Source, built_in: Mapping[str, str]) -> Callable[..., Any]:
    place, _, name = source.driver.rpartition(":")
    if not place:
        if source.driver not in built_in:
            what = f"unknown driver ({source.driver!r} in {source.path}, expected a built-in name or FILE.py:Class)"
            raise unknown(source.key, source.driver, list(built_in), what)
        place, _, name = built_in[source.driver].partition(":")
        return getattr(importlib.import_module(place), name)  # type: ignore[no-any-return]
    path = source.path.parent / place
    spec = importlib.util.spec_from_file_location("serl_chunk_robot_driver_" + path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise source.failed(f"{path} is no Python file")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look there
    sys.path.insert(0, str(path.parent))  # for what lies next to it
    try:
        spec.loader.exec_module(module)
    except Exception as e:
        raise source.failed(f"{path} cannot be imported", e) from e
    finally:
        sys.path.remove(str(path.parent))
    if not callable(getattr(module, name, None)):
        raise source.failed(f"{path} has no class {name}")
    return getattr(module, name)  # type: ignore[no-any-return]

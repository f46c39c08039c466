"""Every format that can be read, one module each, and the choice among them by what lies at a path."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Sequence
from pathlib import Path

from serl_chunk.data.fields import table_of
from serl_chunk.data.source import Format, ReadOptions, Source
from serl_chunk.types import ConfigError

_NAMED, _EPISODES = ("lerobot", "fields"), "episodes"  # formats whose arrays a table names; HDF5 of our own layout
_MODULES = (
    "lerobot.reader",
    *(f"formats.{name}" for name in ("hdf5_fields", "d4rl", "episodes", "hil_serl", "ogbench")),
)


def formats(more: Sequence[Format] = ()) -> dict[str, Format]:
    """Return name -> format: `more` formats of other rooms, then this room's."""
    found = (importlib.import_module(f"serl_chunk.data.{name}").FORMAT for name in _MODULES)
    return {f.name: f for f in more} | {f.name: f for f in found}


def choose(
    path: Path, name: str | None, more: Sequence[Format] = (), *, parameter: str = "format", named: bool = False
) -> Format:
    """Return the format `name`, or the first that `path` looks like, of `more` and this room's.

    `parameter` is the setting that holds `name`, for messages; `named`: a table names the arrays of what lies there.
    Raises ConfigError.
    """
    known = formats(more)
    if name is not None and name not in known:
        raise ConfigError(f"no such format: {name}; valid: {', '.join(known)}", parameter=parameter)
    if not path.exists():
        raise ConfigError(f"{path}: no such file or folder. Pass a file or folder of episodes")
    chosen = known[name] if name is not None else matching(path, more)
    if named and chosen is not None and chosen.name not in _NAMED:
        if name is not None or chosen.name != _EPISODES:
            raise ConfigError(
                f"{path}: a table of fields names arrays of HDF5 files and LeRobot data sets, not of format "
                f"{chosen.name}. Remove it"
            )
        chosen = known[_NAMED[1]]
    if chosen is None:
        what = "folder" if path.is_dir() else "file"
        raise ConfigError(f"{path}: a {what} of no known format. Set {parameter}; valid: {', '.join(known)}")
    return chosen


def matching(path: Path, more: Sequence[Format] = ()) -> Format | None:
    """Return the first format that `path` looks like, or None."""
    for format in formats(more).values():
        with contextlib.suppress(OSError):
            if format.matches(path):
                return format
    return None


def open_episodes(
    path: Path | str,
    options: ReadOptions,
    format: str | None = None,
    more: Sequence[Format] = (),
    *,
    parameter: str = "format",
) -> Source:
    """Open the source at `path`, of the format that it looks like, or of `format`. Raises ConfigError, DataError."""
    path = Path(path).expanduser()
    named = table_of(options.fields, path) is not None
    return choose(path, format, more, parameter=parameter, named=named).open(path, options)

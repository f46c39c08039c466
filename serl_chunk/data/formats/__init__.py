"""Every format that can be read, one module each, and the choice among them by what lies at a path."""

from __future__ import annotations

import contextlib
import importlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from serl_chunk.data.fields import table_of
from serl_chunk.data.formats import episodes, foreign
from serl_chunk.data.source import Format, ReadOptions, Source, Tables
from serl_chunk.data.validate import check_pointer
from serl_chunk.io import plural
from serl_chunk.types import ConfigError

_NAMES = ("hdf5_fields", "d4rl", "episodes", "hil_serl", "ogbench")
_MODULES = ("lerobot.reader", *(f"formats.{name}" for name in _NAMES))
_NAMED = ("lerobot", "fields")  # formats whose arrays a table names
VALID = "Pass a file, a folder of episodes, a data set, or a pattern such as 'demos/*/*.hdf5'"


class NoEpisodesError(ConfigError):
    """A path leads to no episodes."""


def formats(more: Sequence[Format] = ()) -> dict[str, Format]:
    """Return name -> format: `more` formats of other rooms, then this room's."""
    found = (importlib.import_module(f"serl_chunk.data.{name}").FORMAT for name in _MODULES)
    return {f.name: f for f in more} | {f.name: f for f in found}


def choose(
    path: Path, name: str | None, more: Sequence[Format] = (), *, parameter: str = "format", fields: Tables = ()
) -> Format:
    """Return the format `name`, or the first that `path` looks like, of `more` and this room's.

    `parameter` is the setting that holds `name`, for messages; `fields`: tables for data whose arrays they name.
    Raises ConfigError, which names what is known and not read (`formats.foreign`), and DataError for a `check_pointer`.
    """
    known = formats(more)
    if name is not None and name not in known:
        raise ConfigError(f"no such format: {name}; valid: {', '.join(known)}", parameter=parameter)
    if not path.exists():
        raise NoEpisodesError(f"{path}: no such file or folder. {VALID}")
    if path.is_file():
        check_pointer(path)
    chosen = known[name] if name is not None else matching(path, more)
    if table_of(fields, path) is not None and chosen is not None and chosen.name not in _NAMED:
        if name is not None or chosen is not episodes.FORMAT:
            raise ConfigError(
                f"{path}: a table of fields names arrays of HDF5 files and LeRobot data sets, not of format "
                f"{chosen.name}. Remove it"
            )
        chosen = known[_NAMED[1]]
    if (path.is_file() or chosen is None) and (kind := foreign.described(path, of_format=chosen is not None)):
        raise ConfigError(kind)
    if chosen is None:
        what = f"folder of no known format (it has: {_content(path)})" if path.is_dir() else "file of no known format"
        text = f"{path}: a {what}. {VALID}, or name its format: {', '.join(known)}"
        raise NoEpisodesError(text, parameter=parameter)
    return chosen


def _content(folder: Path) -> str:
    suffixes = Counter(p.suffix or "no suffix" for p in folder.iterdir() if p.is_file())
    folders = sum(p.is_dir() for p in folder.iterdir())
    counts = [f"{count} {suffix}" for suffix, count in sorted(suffixes.items())]
    return ", ".join(counts + [plural(folders, "folder")] * bool(folders)) or "nothing"


def matching(path: Path, more: Sequence[Format] = ()) -> Format | None:
    """Return the first format that `path` looks like, or None."""
    if path.suffix.lower() in episodes.SUFFIXES and episodes.holds_one(path):
        return episodes.FORMAT  # without the looks of all others: there may be thousands of files
    for format in formats(more).values():
        with contextlib.suppress(OSError):
            if format.matches(path):
                return format
    return None


def open_one(
    path: Path, options: ReadOptions, format: str | None = None, more: Sequence[Format] = (), **named: str
) -> Source:
    """Open the file or data set at `path`, of the format that it looks like, or of `format`; `named`: of `choose`.

    Raises ConfigError, DataError.
    """
    return choose(path, format, more, fields=options.fields, **named).open(path, options)

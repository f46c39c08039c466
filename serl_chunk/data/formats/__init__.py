"""Every format that can be read, one module each, and the choice among them by what lies at a path."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from serl_chunk.data.source import Format, ReadOptions, Source
from serl_chunk.types import (
    ConfigError,
)
from serl_chunk.types import (
    Episode as Episode,
)
from serl_chunk.types import (
    Observation as Observation,
)
from serl_chunk.types import (
    RobotSpec as RobotSpec,
)
from serl_chunk.types import (
    SparseRows as SparseRows,
)

_MODULES = (
    "serl_chunk.data.lerobot.reader",
    "serl_chunk.data.formats.robomimic",
    "serl_chunk.data.formats.d4rl",
    "serl_chunk.data.formats.episodes",
    "serl_chunk.data.formats.hil_serl",
    "serl_chunk.data.formats.ogbench",
)


def formats() -> dict[str, Format]:
    """Name -> format."""
    import importlib

    modules = [importlib.import_module(name) for name in _MODULES]
    return {f.name: f for f in (m.FORMAT for m in modules)}


def choose(path: Path, name: str | None, more: Sequence[Format] = ()) -> Format:
    """The format named, or the first that `path` looks like, of `more` and this room's; raises ConfigError."""
    known = {f.name: f for f in more} | formats()
    if name is not None and name not in known:
        raise ConfigError(f"--from={name}: no such format; valid: {', '.join(known)}")
    if not path.exists():
        raise ConfigError(f"{path}: there is nothing; give a file or folder of episodes")
    if name is not None:
        return known[name]
    for format in known.values():
        if format.matches(path):
            return format
    what = "a folder" if path.is_dir() else "a file"
    raise ConfigError(f"{path}: {what} of no format that is known; valid with --from: {', '.join(known)}")


def open_source(
    path: Path | str, options: ReadOptions, format: str | None = None, more: Sequence[Format] = ()
) -> Source:
    """The source at `path`, of the format that it looks like, or of the one named; `more`: formats of other rooms.

    Raises ConfigError where there is nothing, for an unknown format, and where no format fits (naming what is there).
    """

    return choose(Path(path).expanduser(), format, more).open(Path(path).expanduser(), options)

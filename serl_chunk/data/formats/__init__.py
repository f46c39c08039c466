"""Every format that can be read, one module each. The order is that in which a path is tried."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from serl_chunk.data.source import Format
from serl_chunk.types import ConfigError

_MODULES = ("lerobot", "robomimic", "d4rl", "episodes", "hil_serl", "ogbench")


def formats() -> dict[str, Format]:
    """Name -> format."""
    import importlib

    modules = [importlib.import_module(f"{__name__}.{name}") for name in _MODULES]
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

"""LeRobot data sets: v3.0, and v2.1."""

from __future__ import annotations

from pathlib import Path

from serl_chunk.data.source import Format, ReadOptions, Source


def matches(path: Path) -> bool:
    """See Format."""
    try:
        return (path / "meta" / "info.json").is_file()
    except OSError:
        return False


def open_source(path: Path, options: ReadOptions) -> Source:
    """See Format; raises ConfigError where pyarrow is not installed."""
    from serl_chunk.data.lerobot.source import open_lerobot  # its libraries are optional

    return open_lerobot(path, options)


FORMAT = Format("lerobot", "LeRobot data set, v3.0 or v2.1: images or videos", matches, open_source)

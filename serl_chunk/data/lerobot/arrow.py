"""pyarrow, imported when it is first used: without LeRobot data sets it need not be installed."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from serl_chunk.types import ConfigError

Table = Any  # pyarrow.Table
Schema = Any  # pyarrow.Schema


class _Late:
    """A module that is imported when one of its names is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        try:
            module = importlib.import_module(self._name)
        except ImportError as error:
            raise ConfigError(
                f"LeRobot data sets need pyarrow, which is not installed ({error}): pip install 'serl-chunk[lerobot]'"
            ) from error
        return getattr(module, attribute)


pa: Any = _Late("pyarrow")
pq: Any = _Late("pyarrow.parquet")


def sync(path: Path) -> None:
    """Wait until the file or folder at `path` is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_arrow(path: Path, schema: Schema, batches: Iterable[Any]) -> None:
    """Write record batches one by one to the new file `path`, and wait until it is on disk."""
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    sync(path)


def read_arrow(path: Path) -> Table:
    """What `write_arrow` wrote; its columns stay in the file, which is mapped into memory."""
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_file(file).read_all()


def write_parquet(part: Path, path: Path, schema: Schema, groups: Iterable[Table], **options: Any) -> None:
    """Write tables, one row group each, to `part`, wait until it is on disk and name it `path`.

    After a crash at any moment there is either no file at `path` or all of it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with pq.ParquetWriter(str(part), schema, **options) as writer:
        for table in groups:
            writer.write_table(table, row_group_size=max(table.num_rows, 1))
    publish(part, path)


def publish(part: Path, path: Path) -> None:
    """Give the finished file `part` its name, in one step and for good."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sync(part)
    os.replace(part, path)
    sync(path.parent)

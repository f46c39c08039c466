"""pyarrow, imported on first use (without LeRobot data sets it need not be installed), and tables in files."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from serl_chunk.data.validate import first_true
from serl_chunk.io import fsync_path, os_reason
from serl_chunk.types import ConfigError, DataError, SerlChunkError

Table = Any  # pyarrow.Table
Schema = Any  # pyarrow.Schema


class LateModule:
    """The module `name`, imported on first use. Raises ConfigError where it is missing: `need` and the error."""

    def __init__(self, name: str, need: str = "LeRobot data sets need pyarrow, which is not installed") -> None:
        self._name, self._need = name, need

    def __getattr__(self, attribute: str) -> Any:
        try:
            return getattr(importlib.import_module(self._name), attribute)
        except ImportError as error:
            raise ConfigError(f"{self._need} ({error}). Run pip install 'serl-chunk[lerobot]'") from error


pa: Any = LateModule("pyarrow")
pc: Any = LateModule("pyarrow.compute")
pq: Any = LateModule("pyarrow.parquet")


@contextlib.contextmanager
def reading(fault: str, remedy: str = "") -> Iterator[None]:
    """Raise DataError in place of the errors that damaged files cause: `fault`, the reason, and `remedy`."""
    try:
        yield
    except SerlChunkError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError, pa.ArrowException) as error:
        raise DataError(f"{fault} ({os_reason(error)}){remedy}") from error


def write_arrow(path: Path, schema: Schema, batches: Iterable[Any]) -> None:
    """Write record batches durably to the new file `path`."""
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    fsync_path(path)


def read_arrow(path: Path) -> Table:
    """Read what `write_arrow` wrote, mapped into memory."""
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_file(file).read_all()


def write_parquet(part: Path, path: Path, schema: Schema, groups: Iterable[Table], **options: Any) -> None:
    """Write tables, one row group each, to `part`, and `publish` it at `path`."""
    with pq.ParquetWriter(str(part), schema, **options) as writer:
        for table in groups:
            writer.write_table(table, row_group_size=max(table.num_rows, 1))
    publish(part, path)


def publish(part: Path, path: Path) -> None:
    """Rename the finished file `part` to `path`, durably: a crash leaves no file there or all of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fsync_path(part)
    os.replace(part, path)
    fsync_path(path.parent)


def matrix(where: str, column: Any, first: int = 0) -> np.ndarray:
    """Return a column of numbers, or of lists of one length, as [N, D]; it begins with row `first` of its file."""
    array = column.combine_chunks() if hasattr(column, "combine_chunks") else column
    if not pa.types.is_nested(array.type):
        return array.to_numpy(zero_copy_only=False)[:, None]
    if pa.types.is_struct(array.type) or pa.types.is_map(array.type) or pa.types.is_union(array.type):
        raise DataError(f"{where} holds {array.type}, not numbers or lists of them")
    if not pa.types.is_fixed_size_list(array.type):
        # Cut anew by `reshape`, lists of 2 and 4 values would become two of 3.
        lengths = array.value_lengths().to_numpy(zero_copy_only=False)
        if (t := first_true(lengths != lengths[0])) is not None:
            raise DataError(
                f"{where} has lists of several lengths: {int(lengths[0])} values in row {first}, {int(lengths[t])} in "
                f"row {first + t}"
            )
    return array.flatten().to_numpy(zero_copy_only=False).reshape(len(array), -1)

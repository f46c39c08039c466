"""Frames that stay in a Parquet file of a LeRobot data set until they are read.

pyarrow reads whole columns of a row group: for one image of an episode, all of them. Columns that are not compressed
hold each value in one piece behind its length (Parquet's encoding PLAIN), so that it can be read alone.
"""

from __future__ import annotations

import functools
import mmap
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np

from serl_chunk.data.frames import FileVersion, Frames, RecentlyUsed, Shape, decode_image, encoded_file
from serl_chunk.data.lerobot.arrow import pc, pq, reading
from serl_chunk.types import DataError

_KEPT_BYTES = 256_000_000  # of image files in memory, of columns that can only be read as a whole; one column at least
_HEADER = 1 << 12  # bytes between two values, at most: a page header; longer ones have statistics, which we never write
_BEGINNING = 64  # bytes by which a value is recognised, with its length


def _read_column(path: Path, version: FileVersion, group: int, column: str) -> Any:
    """The files of the images in a row group, as a pyarrow array."""
    with pq.ParquetFile(str(path)) as file:
        return file.read_row_group(group, columns=[column]).column(0).combine_chunks().field("bytes")


_columns = RecentlyUsed(_KEPT_BYTES, lambda values: int(values.nbytes))
os.register_at_fork(after_in_child=_columns.start_over)


class ParquetFrames(Frames):
    """Frames uint8[H, W, 3] = `shape` that are PNG or JPEG files in `column` of structures `bytes`, `path`.

    Args:
        rows: int[N], rows of the file.
        groups: int[G], the first row of each row group.
    """

    def __init__(
        self,
        path: Path,
        version: FileVersion,
        column: str,
        shape: Shape,
        rows: np.ndarray,
        groups: np.ndarray,
        where: str,
    ) -> None:
        super().__init__(shape, rows)
        self._path, self._version, self._column, self._groups = path, version, column, groups
        self._first, self._where = int(rows[0]) if len(rows) else 0, where

    def decode(self, at: int) -> np.ndarray:
        return decode_image(self._file(at), self._name(at), self.shape[1:])

    def encoded_at(self, at: int) -> bytes | None:
        return encoded_file(self._file(at), self._name(at), self.shape[1:])

    def _name(self, at: int) -> str:
        return f"{self._where}, step {at - self._first}: {self._column}"

    def _file(self, at: int) -> bytes:
        group = int(np.searchsorted(self._groups, at, side="right")) - 1
        row, key = at - int(self._groups[group]), (self._path, self._version, group, self._column)
        with reading(f"{self._name(at)} cannot be read: the file is truncated or damaged"):
            self._version.check(self._path)
            places = find_values(*key)
            if places is None:
                data = _columns.get(key, lambda: _read_column(*key))[row].as_py()
            else:
                with self._path.open("rb", buffering=0) as file:
                    data = os.pread(file.fileno(), int(places[row, 1]), int(places[row, 0]))
        if data is None:
            raise DataError(
                f"{self._name(at)} has no bytes: its image is a file elsewhere, or was never written; only images in "
                "the data set are read"
            )
        return data


@functools.lru_cache(maxsize=1 << 14)  # 16 bytes an image each
def find_values(path: Path, version: FileVersion, group: int, column: str) -> np.ndarray | None:
    """Return int64[N, 2]: offset and length (bytes) of each image file in row group `group`. Reads the column once.

    None where they are compressed, in a dictionary, or absent in some rows.
    """
    with pq.ParquetFile(str(path)) as file:
        about = file.metadata.row_group(group)
        name = f"{column}.bytes"
        chunk = next((c for c in map(about.column, range(about.num_columns)) if c.path_in_schema == name), None)
        if chunk is None or chunk.compression != "UNCOMPRESSED" or chunk.has_dictionary_page:
            return None
        values = pc.struct_field(file.read_row_group(group, columns=[name]).column(0), "bytes")
    if values.null_count:
        return None
    lengths, beginnings = pc.binary_length(values).to_pylist(), pc.binary_slice(values, 0, _BEGINNING).to_pylist()
    offsets = []
    at, end = chunk.data_page_offset, chunk.data_page_offset + chunk.total_compressed_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for length, beginning in zip(lengths, beginnings, strict=True):
            found = data.find(struct.pack("<I", length) + beginning, at, min(at + _HEADER, end))
            if found < 0:
                return None
            offsets.append(found + 4)
            at = found + 4 + length
    return np.column_stack([offsets, lengths]) if at == end else None

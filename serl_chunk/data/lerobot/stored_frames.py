"""Frames that stay in a Parquet file of a LeRobot data set until they are read.

pyarrow reads whole columns of a row group: for one image of an episode, all of them. Columns that are not compressed
hold each value in one piece (Parquet's encoding PLAIN), and its place can be found by walking over the lengths. Page
headers are structures of Thrift's compact protocol: https://parquet.apache.org/docs/file-format/.
"""

from __future__ import annotations

import functools
import mmap
import os
import struct
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

from serl_chunk.data.frames import Encoded, FileVersion, Frames, Shape, decode_image, encoded_file
from serl_chunk.data.lerobot.arrow import pq
from serl_chunk.types import DataError

_KEPT_BYTES = 256_000_000  # of image files in memory, of columns that can only be read as a whole; one column at least
_HEADER = 1 << 12  # bytes of a page header, at most; longer ones have long statistics, which we never write
_DATA_PAGE, _PLAIN = 0, 0  # Parquet's PageType and Encoding
_TYPE, _SIZE, _DATA_HEADER, _VALUES, _ENCODING = 1, 3, 5, 1, 2  # fields of PageHeader and DataPageHeader


class _Columns:
    """Columns that were read last, up to `_KEPT_BYTES`; one user at a time."""

    def __init__(self) -> None:
        self._size = 0
        self._values: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._start_over)

    def get(self, path: Path, version: FileVersion, group: int, column: str) -> Any:
        """The files of the images in a row group, as a pyarrow array."""
        key = path, version, group, column
        with self._lock:
            if key not in self._values:
                with pq.ParquetFile(str(path)) as file:
                    table = file.read_row_group(group, columns=[column])
                self._values[key] = table.column(0).combine_chunks().field("bytes")
                self._size += self._values[key].nbytes
            self._values.move_to_end(key)
            while self._size > _KEPT_BYTES and len(self._values) > 1:
                self._size -= self._values.popitem(last=False)[1].nbytes
            return self._values[key]

    def _start_over(self) -> None:
        self._lock = threading.Lock()


_columns = _Columns()


@functools.lru_cache(maxsize=1024)  # 16 bytes an image each
def _places(path: Path, version: FileVersion, group: int, column: str) -> np.ndarray | None:
    return find_values(path, group, f"{column}.bytes")


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

    def encoded_at(self, at: int) -> Encoded | None:
        return encoded_file(self._file(at), self._name(at), self.shape[1:])

    def _name(self, at: int) -> str:
        return f"{self._where}, step {at - self._first}: {self._column}"

    def _file(self, at: int) -> bytes:
        group = int(np.searchsorted(self._groups, at, side="right")) - 1
        row, key = at - int(self._groups[group]), (self._path, self._version, group, self._column)
        try:
            self._version.check(self._path)
            places = _places(*key)
            if places is None:
                data = _columns.get(*key)[row].as_py()
            else:
                with self._path.open("rb", buffering=0) as file:
                    data = os.pread(file.fileno(), int(places[row, 1]), int(places[row, 0]))
        except DataError:
            raise
        except (OSError, ValueError, LookupError) as error:
            raise DataError(f"{self._name(at)} cannot be read ({error}): the file is truncated or damaged") from error
        if data is None:
            raise DataError(
                f"{self._name(at)} has no bytes: its image is a file elsewhere, or was never written; only images in "
                "the data set are read"
            )
        return data


def find_values(path: Path, group: int, column: str) -> np.ndarray | None:
    """Return int64[N, 2]: offset and length (bytes) of each value of a binary column in row group `group`.

    None where they are compressed, in a dictionary, or absent in some rows.
    """
    about = pq.read_metadata(str(path)).row_group(group)
    chunk = next((c for c in map(about.column, range(about.num_columns)) if c.path_in_schema == column), None)
    if chunk is None or chunk.compression != "UNCOMPRESSED" or chunk.physical_type != "BYTE_ARRAY":
        return None
    if chunk.has_dictionary_page or chunk.num_values != about.num_rows:
        return None
    out = np.empty((chunk.num_values, 2), np.int64)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        found, at = 0, chunk.data_page_offset
        end = at + chunk.total_compressed_size
        while found < len(out):
            page = _page(data, at, end)
            if page is None:
                return None
            start, stop, values = page
            for _ in range(values):
                if start + 4 > stop or found == len(out):
                    return None  # a row without a value
                (length,) = struct.unpack_from("<I", data, start)
                out[found] = start + 4, length
                start, found = start + 4 + length, found + 1
            if start != stop:
                return None
            at = stop
    return out


def _page(data: Any, at: int, end: int) -> tuple[int, int, int] | None:
    """First and last byte of the values of the page at `at`, and its rows; None for pages of another kind."""
    if at >= end:
        return None
    reader = _Compact(data[at : min(at + _HEADER, end)])
    try:
        header = reader.structure()
        about = header[_DATA_HEADER]
        kind, size, values, encoding = header[_TYPE], header[_SIZE], about[_VALUES], about[_ENCODING]
    except (IndexError, KeyError, ValueError):
        return None
    start = at + reader.at
    stop = start + size
    if kind != _DATA_PAGE or encoding != _PLAIN or stop > end or size < 4:
        return None
    (levels,) = struct.unpack_from("<I", data, start)  # which rows have a value
    return start + 4 + levels, stop, values


class _Compact:
    """Reads Thrift's compact protocol; raises IndexError at the end of `data`, ValueError for unknown types."""

    def __init__(self, data: bytes) -> None:
        self._data, self.at = data, 0

    def structure(self) -> dict[int, Any]:
        out: dict[int, Any] = {}
        field = 0
        while head := self._byte():
            field = field + (head >> 4) if head >> 4 else self._signed()
            out[field] = self._value(head & 15)
        return out

    def _value(self, kind: int) -> Any:
        if kind in (1, 2):
            return kind == 1
        if kind == 3:
            return self._byte()
        if kind in (4, 5, 6):
            return self._signed()
        if kind == 7:
            return self._bytes(8)
        if kind == 8:
            return self._bytes(self._varint())
        if kind in (9, 10):
            head = self._byte()
            n = head >> 4 if head >> 4 != 15 else self._varint()
            return [self._value(head & 15) for _ in range(n)]
        if kind == 12:
            return self.structure()
        raise ValueError(f"type {kind}")

    def _byte(self) -> int:
        self.at += 1
        return self._data[self.at - 1]

    def _bytes(self, n: int) -> bytes:
        self.at += n
        if self.at > len(self._data):
            raise IndexError(n)
        return self._data[self.at - n : self.at]

    def _varint(self) -> int:
        out = shift = 0
        while True:
            byte = self._byte()
            out |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return out

    def _signed(self) -> int:
        n = self._varint()
        return (n >> 1) ^ -(n & 1)

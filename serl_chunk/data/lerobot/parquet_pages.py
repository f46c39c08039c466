"""Where single values lie in a Parquet file.

pyarrow reads whole columns of a row group: for one image of an episode, all of them. Columns that are not compressed
hold each value in one piece (Parquet's encoding PLAIN), and its place can be found by walking over the lengths. Page
headers are structures of Thrift's compact protocol: https://parquet.apache.org/docs/file-format/.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np

from serl_chunk.data.lerobot.arrow import pq

_HEADER = 1 << 12  # bytes of a page header, at most; longer ones have long statistics, which we never write
_DATA_PAGE, _PLAIN = 0, 0  # Parquet's PageType and Encoding
_TYPE, _SIZE, _DATA_HEADER, _VALUES, _ENCODING = 1, 3, 5, 1, 2  # fields of PageHeader and DataPageHeader


def find_values(path: Path, group: int, column: str) -> np.ndarray | None:
    """int64[N, 2]: offset and length (bytes) of each value of a binary column in row group `group`.

    None where they do not lie there as they are: compressed, in a dictionary, absent in some rows.
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
    """Where the values of the page at `at` begin and end, and how many rows it has; None for pages of another kind."""
    if at >= end:
        return None
    reader = _Compact(data[at : min(at + _HEADER, end)])
    try:
        header = reader.structure()
        about = header[_DATA_HEADER]
        kind, size, values, encoding = header[_TYPE], header[_SIZE], about[_VALUES], about[_ENCODING]
    except (IndexError, KeyError, ValueError):
        return None
    if kind != _DATA_PAGE or encoding != _PLAIN:
        return None
    start = at + reader.at
    stop = start + size
    if stop > end or size < 4:
        return None
    (levels,) = struct.unpack_from("<I", data, start)  # which rows have a value
    return start + 4 + levels, stop, values


class _Compact:
    """Reads Thrift's compact protocol; raises IndexError at the end of `data`, ValueError for what it does not know."""

    def __init__(self, data: bytes) -> None:
        self._data, self.at = data, 0

    def structure(self) -> dict[int, Any]:
        """Field number -> value."""
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

"""Frames that stay in the files of a LeRobot data set until they are read."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from serl_chunk.data.formats.hdf5_frames import FileVersion, image_header
from serl_chunk.data.frames import Encoded, Frames, decode_image
from serl_chunk.data.lerobot.arrow import pq
from serl_chunk.data.lerobot.parquet_pages import find_values
from serl_chunk.types import DataError

_KEPT_BYTES = 256_000_000  # of image files in memory, of columns that can only be read as a whole; one column at least
_KEPT_TABLES = 1024  # of places of images: 16 bytes an image
_PNG = b"\x89PNG\r\n\x1a\n"
_JPEG, _JPEG_END = b"\xff\xd8\xff", b"\xff\xd9"
Place = tuple[Path, FileVersion, int, str]  # a file, its row group, a column


class _Kept:
    """What was read last, up to a size; one user at a time."""

    def __init__(self, limit: int) -> None:
        self._limit, self._size = limit, 0
        self._values: OrderedDict[Place, tuple[int, Any]] = OrderedDict()
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._start_over)

    def get(self, key: Place, make: Callable[[], tuple[int, Any]]) -> Any:
        """The value at `key`; `make` gives its size and itself."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            else:
                self._values[key] = make()
                self._size += self._values[key][0]
            while self._size > self._limit and len(self._values) > 1:
                self._size -= self._values.popitem(last=False)[1][0]
            return self._values[key][1]

    def _start_over(self) -> None:
        self._lock = threading.Lock()


_places, _columns = _Kept(_KEPT_TABLES), _Kept(_KEPT_BYTES)


class ParquetFrames(Frames):
    """Frames that are PNG or JPEG files in a column of structures `bytes`, `path`.

    Args:
        path, version: the Parquet file, and what it was when it was first looked at.
        column: its name.
        shape: [H, W, 3].
        rows: int[N], rows of the file.
        groups: int[G], the first row of each row group.
        where: for messages.
    """

    def __init__(
        self,
        path: Path,
        version: FileVersion,
        column: str,
        shape: tuple[int, int, int],
        rows: np.ndarray,
        groups: np.ndarray,
        where: str,
    ) -> None:
        super().__init__(shape, rows)
        self._path, self._version, self._column, self._groups = path, version, column, groups
        self._first, self._where = int(rows[0]) if len(rows) else 0, where

    def decode(self, at: int) -> np.ndarray:
        """See Frames."""
        return decode_image(self._file(at), self._name(at), self.shape[1:])

    def encoded_at(self, at: int) -> Encoded | None:
        """See Frames: None where it is grey, or has a palette or transparency."""
        data, name = self._file(at), self._name(at)
        if data.startswith(_JPEG) and not data.endswith(_JPEG_END):  # what is copied is not decoded
            raise DataError(f"{name}: not a whole JPEG or PNG image (it has no end)")
        height, width, mode = image_header(data, name)
        if (height, width) != self.shape[1:3]:
            raise DataError(
                f"{name}: an image of {height}x{width} pixels among those of {self.shape[1]}x{self.shape[2]}"
            )
        return Encoded("png" if data.startswith(_PNG) else "jpeg", data) if mode == "RGB" else None

    def _name(self, at: int) -> str:
        return f"{self._where}, step {at - self._first}: {self._column}"

    def _file(self, at: int) -> bytes:
        group = int(np.searchsorted(self._groups, at, side="right")) - 1
        row, key = at - int(self._groups[group]), (self._path, self._version, group, f"{self._column}.bytes")
        try:
            if FileVersion.of(self._path) != self._version:
                raise DataError(f"{self._path}: the file was changed while it was being read; read it again")
            places = _places.get(key, lambda: (1, find_values(self._path, group, key[3])))
            if places is None:
                data = _columns.get(key, lambda: self._read(group))[row].as_py()
            else:
                with self._path.open("rb", buffering=0) as file:
                    data = os.pread(file.fileno(), int(places[row, 1]), int(places[row, 0]))
        except (OSError, ValueError, LookupError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{self._name(at)} cannot be read ({error}): the file is truncated or damaged") from error
        if data is None:
            raise DataError(
                f"{self._name(at)} has no bytes: its image is a file elsewhere, or was never written; data sets are "
                "read whose images are in them"
            )
        return data

    def _read(self, group: int) -> tuple[int, Any]:
        with pq.ParquetFile(str(self._path)) as file:
            column = file.read_row_group(group, columns=[self._column]).column(0)
        values = column.combine_chunks().field("bytes")
        return values.nbytes, values


class VideoFrames(Frames):
    """Frames of a video.

    Args:
        path, version: the video file, and what it was when it was first looked at.
        shape: [H, W, 3].
        seconds: float64[N], times of the frames in the video.
        tolerance_s: by how much a frame may lie beside its time.
        where: for messages.
    """

    def __init__(
        self,
        path: Path,
        version: FileVersion,
        shape: tuple[int, int, int],
        seconds: np.ndarray,
        tolerance_s: float,
        where: str,
    ) -> None:
        super().__init__(shape, np.arange(len(seconds)))
        self._path, self._version, self._seconds = path, version, seconds
        self._tolerance_s, self._where = tolerance_s, where

    def decode(self, at: int) -> np.ndarray:
        """See Frames."""
        from serl_chunk.data.lerobot.video import frame_at

        try:
            image = frame_at(self._path, self._version, float(self._seconds[at]), self._tolerance_s)
        except DataError as error:
            raise DataError(f"{self._where}, step {at}: {error}") from error
        if image.shape != self.shape[1:]:
            raise DataError(
                f"{self._where}, step {at}: {self._path} has frames of {image.shape[0]}x{image.shape[1]} pixels, "
                f"meta/info.json says {self.shape[1]}x{self.shape[2]}"
            )
        return image

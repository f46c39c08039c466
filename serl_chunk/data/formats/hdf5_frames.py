"""Frames that stay in their HDF5 file until they are read."""

from __future__ import annotations

import io
import os
import threading
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from serl_chunk.data.formats.hdf5_io import ERRORS, member, raise_machine_fault
from serl_chunk.data.frames import Encoded, Frames, decode_image
from serl_chunk.types import DataError

MAX_OPEN = 32  # files a process keeps open: a data loader jumps between episodes, a converter reads one at a time
_JPEG, _PNG = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"
_JPEG_END = b"\xff\xd9"


class FileVersion(NamedTuple):
    """What tells a file from another one that took its name."""

    size: int
    modified: int  # ns

    @classmethod
    def of(cls, path: Path) -> FileVersion:
        """Of the file at `path` now; raises OSError."""
        now = os.stat(path)
        return cls(now.st_size, now.st_mtime_ns)


class _OpenFile(NamedTuple):
    version: FileVersion
    file: h5py.File
    datasets: dict[str, h5py.Dataset]


class _OpenFiles:
    """The few files that were read last, opened for reading; one user at a time."""

    def __init__(self) -> None:
        self._files: OrderedDict[Path, _OpenFile] = OrderedDict()
        self._lock = threading.Lock()
        # A child of fork shares the library's state but not its place in the files: it opens its own.
        os.register_at_fork(after_in_child=self._start_over)

    def read(self, path: Path, version: FileVersion, name: str, get: Callable[[h5py.Dataset], Any]) -> Any:
        """`get(dataset)`, and the file stays open. Raises DataError where it is no longer the `version` it was."""
        with self._lock:
            if FileVersion.of(path) != version:
                self._forget(path)
                raise DataError(f"{path}: the file was changed while it was being read; read it again")
            if path in self._files and self._files[path].version == version:
                self._files.move_to_end(path)
            else:
                self._forget(path)
                self._files[path] = _OpenFile(version, h5py.File(path, "r"), {})
            while len(self._files) > MAX_OPEN:
                self._files.popitem(last=False)[1].file.close()
            found = self._files[path]
            if name not in found.datasets:  # looking one up takes longer than reading a frame
                found.datasets[name] = found.file[name]
            return get(found.datasets[name])

    def close(self, path: Path | None = None) -> None:
        """Close the file at `path`, or all: h5py opens no file for writing that its process holds open."""
        with self._lock:
            for each in [path] if path is not None else list(self._files):
                self._forget(each)

    def _forget(self, path: Path) -> None:
        if path in self._files:
            self._files.pop(path).file.close()

    def _start_over(self) -> None:
        self._files, self._lock = OrderedDict(), threading.Lock()


_open_files = _OpenFiles()
close_files = _open_files.close


class _Hdf5Frames(Frames):
    """Rows of one dataset.

    Args:
        path, version: the file, and what it was when it was first looked at.
        name: the dataset.
        shape: [H, W, 3].
        ticks: int[M], of the dataset's rows, for messages.
        swap: the channels are stored as blue, green, red.
    """

    def __init__(
        self, path: Path, version: FileVersion, name: str, shape: tuple[int, int, int], ticks: np.ndarray, swap: bool
    ) -> None:
        super().__init__(shape, np.arange(len(ticks)))
        self._path, self._version, self._name, self._ticks, self._swap = path, version, name, ticks, swap

    def decode(self, at: int) -> np.ndarray:
        """See Frames."""
        image = self._image(at)
        return np.ascontiguousarray(image[..., ::-1]) if self._swap else image

    @abstractmethod
    def _image(self, at: int) -> np.ndarray:
        """The image in the order of its stored channels."""

    def _where(self, at: int) -> str:
        return f"{self._path}: the frame at tick {int(self._ticks[at])} of {self._name}"

    def _read(self, at: int, get: Callable[[h5py.Dataset], Any]) -> Any:
        try:
            return _open_files.read(self._path, self._version, self._name, get)
        except DataError:
            raise
        except ERRORS as error:
            raise_machine_fault(self._where(at), error)
            raise DataError(
                f"{self._where(at)} cannot be read ({error}): the file is truncated or damaged; remove it or record it "
                "again"
            ) from error


class RawHdf5Frames(_Hdf5Frames):
    """Frames of a dataset uint8[M, H, W, 3]."""

    def _image(self, at: int) -> np.ndarray:
        return self._read(at, lambda dataset: dataset[at])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """As in Frames; consecutive rows are read at once."""
        n = len(self)
        if copy is False or self._swap or n == 0 or (np.diff(self._at) != 1).any():
            return super().__array__(dtype, copy)
        first = int(self._at[0])
        out = self._read(first, lambda dataset: dataset[first : first + n])
        return out if dtype is None else out.astype(dtype)


class JpegHdf5Frames(_Hdf5Frames):
    """Frames of a dataset uint8[M, L] whose rows are JPEG files (or PNG), filled up with zeros to one length."""

    def _image(self, at: int) -> np.ndarray:
        return decode_image(self._file(at), self._where(at), self.shape[1:])

    def encoded_at(self, at: int) -> Encoded | None:
        """See Frames: None where the channels are in another order or grey, since the file then is no image of RGB."""
        if self._swap:
            return None
        data = self._file(at)
        # What is copied is not decoded, so that at least its two ends must be there.
        if data.startswith(_JPEG) and not data.endswith(_JPEG_END):
            raise DataError(f"{self._where(at)}: not a whole JPEG or PNG image (it has no end)")
        height, width, mode = image_header(data, self._where(at))
        if (height, width) != self.shape[1:3]:
            raise DataError(
                f"{self._where(at)}: an image of {height}x{width} pixels among those of {self.shape[1]}x{self.shape[2]}"
            )
        return Encoded("png" if data.startswith(_PNG) else "jpeg", data) if mode == "RGB" else None

    def _file(self, at: int) -> bytes:
        # The length of a row is what remains without its zeros: no JPEG or PNG file ends in one.
        return self._read(at, lambda dataset: dataset[at].tobytes()).rstrip(b"\0")


def image_header(data: bytes, where: str) -> tuple[int, int, str]:
    """Height, width and PIL's mode of a JPEG or PNG file, from its header; raises DataError beginning with `where`."""
    from PIL import Image  # slow to import, and few files need it

    try:
        with Image.open(io.BytesIO(data), formats=("JPEG", "PNG")) as image:
            return image.height, image.width, image.mode
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{where}: not a whole JPEG or PNG image ({error})") from error


def frames_of(path: Path, version: FileVersion, file: h5py.File, name: str, ticks: np.ndarray, swap: bool) -> Frames:
    """The frames of dataset `name`, M rows at `ticks` int[M], raw or as JPEG rows; raises DataError."""
    dataset = member(path, file, name)
    if not isinstance(dataset, h5py.Dataset):
        raise DataError(f"{path}: no dataset {name}; this is not an episode, or it was not written to its end")
    if dataset.dtype != np.uint8 or dataset.ndim not in (2, 4) or (dataset.ndim == 4 and dataset.shape[3] != 3):
        raise DataError(
            f"{path}: {name} must be uint8[T, H, W, 3] or padded JPEG rows uint8[T, L], it is "
            f"{dataset.dtype}{list(dataset.shape)}"
        )
    if len(dataset) != len(ticks):
        raise DataError(f"{path}: {name} has {len(dataset)} rows and ticks of shape {ticks.shape}")
    if dataset.ndim == 4:
        return RawHdf5Frames(path, version, name, dataset.shape[1:], ticks, swap)
    if not len(dataset):
        return RawHdf5Frames(path, version, name, (0, 0, 3), ticks, swap)
    height, width, _ = image_header(dataset[0].tobytes(), f"{path}: the frame at tick {int(ticks[0])} of {name}")
    return JpegHdf5Frames(path, version, name, (height, width, 3), ticks, swap)

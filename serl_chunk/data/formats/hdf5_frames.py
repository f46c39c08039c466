"""Frames that stay in their HDF5 file until they are read."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from serl_chunk.data.formats.hdf5_io import ERRORS, dataset_of, raise_machine_fault
from serl_chunk.data.frames import (
    Encoded,
    FileVersion,
    Frames,
    OpenFiles,
    Shape,
    decode_image,
    encoded_file,
    image_size,
)
from serl_chunk.types import DataError


class _Opened:
    def __init__(self, path: Path) -> None:
        self._file = h5py.File(path, "r")
        self._datasets: dict[str, h5py.Dataset] = {}
        self.close = self._file.close

    def dataset(self, name: str) -> h5py.Dataset:
        if name not in self._datasets:  # looking one up takes longer than reading a frame
            self._datasets[name] = self._file[name]
        return self._datasets[name]


open_files = OpenFiles(_Opened, 32)  # a data loader jumps between episodes
close_files = open_files.close


class _Hdf5Frames(Frames):
    """Rows of dataset `name` at `ticks` int[M]; `swap`: the channels are stored as blue, green, red."""

    def __init__(
        self, path: Path, version: FileVersion, name: str, shape: Shape, ticks: np.ndarray, swap: bool
    ) -> None:
        super().__init__(shape, np.arange(len(ticks)))
        self._path, self._version, self._name, self._ticks, self._swap = path, version, name, ticks, swap

    def decode(self, at: int) -> np.ndarray:
        image = self._image(at)
        return np.ascontiguousarray(image[..., ::-1]) if self._swap else image

    @abstractmethod
    def _image(self, at: int) -> np.ndarray:
        """The image in the order of its stored channels."""

    def _where(self, at: int) -> str:
        return f"{self._path}: the frame at tick {int(self._ticks[at])} of {self._name}"

    def _read(self, at: int, get: Callable[[h5py.Dataset], Any]) -> Any:
        try:
            return open_files.use(self._path, self._version, lambda file: get(file.dataset(self._name)))
        except DataError:
            raise
        except ERRORS as error:
            raise_machine_fault(self._where(at), error)
            raise DataError(
                f"{self._where(at)} cannot be read: the file is truncated or damaged ({error}). Remove it or record it "
                "again"
            ) from error


class RawHdf5Frames(_Hdf5Frames):
    """Frames of a dataset uint8[M, H, W, 3]."""

    def _image(self, at: int) -> np.ndarray:
        return self._read(at, lambda dataset: dataset[at])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        n = len(self)
        if copy is False or self._swap or n == 0 or (np.diff(self._at) != 1).any():
            return super().__array__(dtype, copy)
        first = int(self._at[0])  # consecutive rows are read at once
        out = self._read(first, lambda dataset: dataset[first : first + n])
        return out if dtype is None else out.astype(dtype)


class JpegHdf5Frames(_Hdf5Frames):
    """Frames of a dataset uint8[M, L] whose rows are JPEG files (or PNG), padded with zeros to one length."""

    def _image(self, at: int) -> np.ndarray:
        return decode_image(self._file(at), self._where(at), self.shape[1:])

    def encoded_at(self, at: int) -> Encoded | None:
        # With swapped channels the file is no image of RGB.
        return None if self._swap else encoded_file(self._file(at), self._where(at), self.shape[1:])

    def _file(self, at: int) -> bytes:
        # The length of a row is what remains without its zeros: no JPEG or PNG file ends in one.
        return self._read(at, lambda dataset: dataset[at].tobytes()).rstrip(b"\0")


def frames_of(path: Path, version: FileVersion, file: h5py.File, name: str, ticks: np.ndarray, swap: bool) -> Frames:
    """Return the frames of dataset `name`, M rows at `ticks` int[M], raw or as JPEG rows. Raises DataError."""
    dataset = dataset_of(path, file, name)
    if dataset.dtype != np.uint8 or dataset.ndim not in (2, 4) or (dataset.ndim == 4 and dataset.shape[3] != 3):
        raise DataError(
            f"{path}: {name} is {dataset.dtype}{list(dataset.shape)}, expected uint8[T, H, W, 3] or padded JPEG rows "
            "uint8[T, L]"
        )
    if len(dataset) != len(ticks):
        raise DataError(f"{path}: {name} has {len(dataset)} rows, its ticks have the shape {ticks.shape}")
    if dataset.ndim == 4 or not len(dataset):
        shape = dataset.shape[1:] if dataset.ndim == 4 else (0, 0, 3)
        return RawHdf5Frames(path, version, name, shape, ticks, swap)
    size = image_size(dataset[0].tobytes(), f"{path}: the frame at tick {int(ticks[0])} of {name}")
    return JpegHdf5Frames(path, version, name, (*size, 3), ticks, swap)

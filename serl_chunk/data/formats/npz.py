"""Numeric arrays out of .npz files: what they are is known before they are read, and nothing is unpickled."""

from __future__ import annotations

import math
import zipfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from serl_chunk.data.formats.hdf5_io import MAX_RATIO, raise_machine_fault
from serl_chunk.types import DataError

_DAMAGED = (EOFError, KeyError, ValueError, TypeError, RuntimeError, zipfile.BadZipFile, zlib.error)
_ERRORS = (OSError, MemoryError, *_DAMAGED)
_FLOOR = 4096  # bytes; below, any ratio is harmless


class Header(NamedTuple):
    """Shape and dtype of an array, as its header says."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def headers(path: Path) -> dict[str, Header]:
    """Of every array in the file, without reading them.

    Raises DataError: the file is cut short or no .npz file, or an array is of objects, does not have the size that its
    header says, or is larger than what is stored can fill.
    """
    out = {}
    try:
        with zipfile.ZipFile(path) as file:
            for member in file.infolist():
                if not member.filename.endswith(".npy"):
                    continue
                name = member.filename.removesuffix(".npy")
                if member.file_size > MAX_RATIO * max(member.compress_size, _FLOOR):
                    raise DataError(
                        f"{path}: {name} declares {member.file_size} bytes, {member.compress_size} are stored: it was "
                        "made to fill this machine's memory; leave the file out"
                    )
                with file.open(member) as data:
                    version = np.lib.format.read_magic(data)  # type: ignore[arg-type]
                    if version not in ((1, 0), (2, 0)):
                        raise DataError(f"{path}: {name} is in version {version[0]}.{version[1]} of numpy's format")
                    read = np.lib.format.read_array_header_1_0
                    if version == (2, 0):
                        read = np.lib.format.read_array_header_2_0
                    shape, _, dtype = read(data)  # type: ignore[arg-type]
                    start = data.tell()
                if dtype.hasobject:
                    raise DataError(f"{path}: {name} is an array of objects, a pickle that could run code: not read")
                if member.file_size != start + math.prod(shape) * dtype.itemsize:
                    raise DataError(f"{path}: {name} has another size than its header says; download the file again")
                out[name] = Header(shape, dtype)
    except _ERRORS as error:
        raise _broken(path, error) from error
    return out


def load(path: Path, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    """The arrays `names`, read-only; raises DataError. Check their `headers` first."""
    try:
        with np.load(path, allow_pickle=False) as file:
            # By its whole name: numpy prefers a member without the suffix, whose header was not checked.
            arrays = {name: file[f"{name}.npy"] for name in names}
    except _ERRORS as error:
        raise _broken(path, error) from error
    for array in arrays.values():
        array.flags.writeable = False
    return arrays


def _broken(path: Path, error: Exception) -> DataError:
    if isinstance(error, DataError):
        return error
    raise_machine_fault(path, error)
    return DataError(f"{path}: not a whole .npz file ({error}); download the file again")

"""Numeric arrays out of .npz files: their headers are checked before they are read, and nothing is unpickled."""

from __future__ import annotations

import contextlib
import math
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from serl_chunk.data.formats.hdf5_io import FLOOR, MAX_RATIO, raise_machine_fault
from serl_chunk.io import os_reason
from serl_chunk.types import DataError

_DAMAGED = (EOFError, KeyError, ValueError, TypeError, RuntimeError, zipfile.BadZipFile, zlib.error)


class Header(NamedTuple):
    """Shape and dtype of an array, from its header."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def headers(path: Path) -> dict[str, Header]:
    """Return the headers of all arrays in the file, without reading these. Raises DataError where one is unsafe."""
    out = {}
    with _errors(path), zipfile.ZipFile(path) as file:
        for member in file.infolist():
            if not member.filename.endswith(".npy"):
                continue
            name = member.filename.removesuffix(".npy")
            if member.file_size > MAX_RATIO * max(member.compress_size, FLOOR):
                raise DataError(
                    f"{path}: {name} declares {member.file_size} bytes, {member.compress_size} are stored: it was "
                    "made to fill this machine's memory. Leave the file out"
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
                raise DataError(f"{path}: {name} does not have the size in its header. Download the file again")
            out[name] = Header(shape, dtype)
    return out


def load(path: Path, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Read the arrays `names`, read-only. Raises DataError. Check their `headers` first."""
    with _errors(path), np.load(path, allow_pickle=False) as file:
        # By its whole name: numpy prefers a member without the suffix, whose header was not checked.
        arrays: dict[str, np.ndarray] = {name: file[f"{name}.npy"] for name in names}
    for array in arrays.values():
        array.flags.writeable = False
    return arrays


@contextlib.contextmanager
def _errors(path: Path) -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    except (OSError, MemoryError, *_DAMAGED) as error:
        raise_machine_fault(path, error)
        raise DataError(f"{path}: not a whole .npz file ({os_reason(error)}). Download the file again") from error

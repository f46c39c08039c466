"""HDF5 files of other projects, opened so that whatever is wrong with one is said in a sentence."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np

from serl_chunk.types import DataError


@contextlib.contextmanager
def opened(path: Path) -> Iterator[h5py.File]:
    """The file at `path` for reading; raises DataError for every way in which h5py reports damage."""
    try:
        with h5py.File(path, "r") as file:
            yield file
    except DataError:
        raise
    except (OSError, RuntimeError, KeyError, ValueError, TypeError, OverflowError, MemoryError) as error:
        raise DataError(
            f"{path}: the file is truncated, damaged or not HDF5 ({error}); download it again or leave it out"
        ) from error


def numbers(where: str, group: h5py.Group, name: str, ndim: int) -> h5py.Dataset:
    """The dataset `name` of real numbers and `ndim` dimensions, not read yet; raises DataError."""
    dataset = group.get(name)
    if not isinstance(dataset, h5py.Dataset):
        raise DataError(f"{where}: no dataset {name}; it has: {', '.join(sorted(group)) or 'nothing'}")
    if dataset.dtype.kind not in "biuf":
        raise DataError(f"{where}: {name} holds {dataset.dtype}, not numbers")
    if dataset.ndim != ndim:
        raise DataError(f"{where}: {name} must have {ndim} dimensions, its shape is {[*dataset.shape]}")
    return dataset


def rows(dataset: h5py.Dataset, start: int = 0, stop: int | None = None) -> np.ndarray:
    """Rows `start <= i < stop`, as float32 where they are not of that type already."""
    with np.errstate(over="ignore"):  # what overflows becomes infinite, and is refused as such
        return np.asarray(dataset[start:stop]).astype(np.float32, copy=False)

"""Low-level HDF5: untrusted files opened with errors that name the fault, and files written piece by piece.

Nothing in a file is trusted: it may name other files of this machine, or declare arrays far larger than itself.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from serl_chunk.data.fields import ArrayInfo
from serl_chunk.data.frames import (
    IMAGE_FILES,
    FileVersion,
    Frames,
    OpenFiles,
    decode_image,
    encoded_file,
    image_size,
)
from serl_chunk.data.validate import check_pointer
from serl_chunk.io import os_reason
from serl_chunk.types import DataError, SerlChunkError

# What h5py raises for a damaged byte, or for an item of another kind than expected: it depends on the structure.
ERRORS = (OSError, RuntimeError, LookupError, ValueError, TypeError, OverflowError, AttributeError, MemoryError)
MAX_RATIO = 1100  # bytes that a stored byte may stand for: gzip reaches 1032
FLOOR = 4096  # bytes below which any ratio is harmless
_MACHINE = {errno.EMFILE, errno.ENFILE, errno.EIO, errno.ENOMEM, errno.ESTALE, errno.EACCES}
_CAMERA = re.compile("image|rgb|cam", re.IGNORECASE)  # in the name of an array whose type cannot be told
_DEEPEST = 8  # groups in groups that are looked into: a link may lead back to one above
_MAX_LINKS = 16  # soft links on the way to an item, as in HDF5


class MachineError(SerlChunkError, OSError):
    """This machine could not read a file that may be whole: not the episode's fault, so never a DataError."""


class NoMemoryError(SerlChunkError, MemoryError):
    """As MachineError, for lack of memory."""


def raise_machine_fault(where: object, error: Exception) -> None:
    """Raise MachineError or NoMemoryError where `error` is the machine's failure, not the file's; else return."""
    if isinstance(error, MachineError | NoMemoryError):
        raise error
    if isinstance(error, MemoryError):
        raise NoMemoryError(f"{where}: not enough memory to read it ({error})") from error
    number = getattr(error, "errno", None)
    in_text = re.findall(r"errno = (\d+), error message", str(error))  # h5py sets no errno where a read fails
    if number is None and in_text:
        number = int(in_text[-1])
    if number in _MACHINE:
        raise MachineError(
            f"{where}: this machine could not read the file ({os_reason(error)}). Correct that and try again"
        ) from error


@contextlib.contextmanager
def file_faults(
    where: object, fault: str, remedy: str = "", *, errors: type[Exception] | tuple[type[Exception], ...] = ERRORS
) -> Iterator[None]:
    """Raise `errors` of the block as DataError with the `fault`, or as `raise_machine_fault` does."""
    try:
        yield
    except DataError:
        raise
    except errors as error:
        raise_machine_fault(where, error)
        raise DataError(f"{where}: {fault} ({os_reason(error)}){remedy and f'. {remedy}'}") from error


@contextlib.contextmanager
def opened(path: Path) -> Iterator[h5py.File]:
    """Open the file at `path` for reading. Raises as `file_faults`."""
    check_pointer(path)
    fault = "the file is truncated, damaged or not HDF5"
    with file_faults(path, fault, "Copy or record it again, or leave it out"), h5py.File(path, "r") as file:
        yield file


def looks_like(path: Path, fits: Callable[[h5py.File], bool]) -> bool:
    """Return whether `path` is an HDF5 file that `fits`, or raises DataError there: opening it names the reason."""
    try:
        if not path.is_file():
            return False
        with h5py.File(path, "r") as file:
            return fits(file)
    except DataError:
        return True
    except (OSError, RuntimeError, KeyError, ValueError):
        return False


def member(where: object, group: h5py.Group, name: str) -> h5py.Group | h5py.Dataset | h5py.Datatype | None:
    """Return item `name` of `group`, None where there is none; a dataset can be read safely.

    Raises DataError starting with `where`: it lies in other files, or is larger than what is stored can fill.
    """
    _refuse_external_links(where, group, name, _MAX_LINKS)
    item = group.get(name)
    if isinstance(item, h5py.Dataset):
        checked(where, item)
    return item


def names(group: h5py.Group) -> set[str]:
    """Return the names in `group`; unlike `in`, opens nothing that a link names."""
    return set(group)


def checked(where: object, dataset: h5py.Dataset) -> h5py.Dataset:
    """Return `dataset`, whose own file holds all its values. Raises DataError as `member` does."""
    if dataset.is_virtual or dataset.external:
        raise DataError(f"{where}: dataset {dataset.name} takes its values from other files, which are not read")
    stored = dataset.id.get_storage_size()
    declared = int(dataset.nbytes)
    if dataset.chunks and stored:  # a chunk is unpacked whole, and may reach beyond the dataset
        declared = max(declared, math.prod(dataset.chunks) * dataset.dtype.itemsize)
    if declared > MAX_RATIO * max(stored, FLOOR):
        raise DataError(
            f"{where}: dataset {dataset.name} declares {declared} bytes, {stored} are stored: it was not written to "
            "its end, or was made to fill this machine's memory. Leave the file out"
        )
    return dataset


def _refuse_external_links(where: object, group: h5py.Group, name: str, links: int) -> None:
    """Before anything is opened: even looking at what an external link names opens another file."""
    at = group["/"] if name.startswith("/") else group
    for part in filter(None, name.split("/")):
        if not isinstance(at, h5py.Group):
            return
        link = at.get(part, getlink=True)
        if isinstance(link, h5py.ExternalLink):
            raise DataError(f"{where}: {name} is a link to another file ({link.filename!r}), which is not read")
        if isinstance(link, h5py.SoftLink):
            if not links:
                raise DataError(f"{where}: {name} leads through too many links")
            _refuse_external_links(where, at, link.path, links - 1)
        at = at.get(part)


def dataset_of(where: object, group: h5py.Group, name: str) -> h5py.Dataset:
    """Return the dataset `name`, not read yet. Raises DataError where there is none, or as `member` does."""
    dataset = member(where, group, name)
    if not isinstance(dataset, h5py.Dataset):
        above = name.rpartition("/")[0]
        beside = member(where, group, above) if above else group
        there = listing(beside if isinstance(beside, h5py.Group) else group)
        raise DataError(f"{where}: no dataset {name}; it has: {there}. The file is incomplete or no such data")
    return dataset


def group_of(where: object, group: h5py.Group, name: str) -> h5py.Group:
    """As `dataset_of`, of a group."""
    found = member(where, group, name)
    if not isinstance(found, h5py.Group):
        raise DataError(f"{where}: no group {name}; it has: {listing(group)}")
    return found


def listing(group: h5py.Group) -> str:
    """Return the names in `group` for messages."""
    return ", ".join(sorted(group)) or "nothing"


def numbers(where: object, group: h5py.Group, name: str, ndim: int | None = None) -> h5py.Dataset:
    """Return the dataset `name` of real numbers and `ndim` dimensions, not read yet. Raises DataError."""
    dataset = dataset_of(where, group, name)
    if dataset.dtype.kind not in "biuf":
        raise DataError(f"{where}: {name} holds {dataset.dtype}, not numbers")
    if ndim is not None and dataset.ndim != ndim:
        raise DataError(f"{where}: {name} has the shape {[*dataset.shape]} (expected {ndim} dimensions)")
    return dataset


def in_color(item: Any) -> bool:
    """Return False for what a group of cameras holds in addition to images in colour: depths, masks, single channels.

    Whether the others are such images, `frames_of` tells.
    """
    if not isinstance(item, h5py.Dataset) or item.dtype.kind not in "biuf":
        return True
    return item.dtype.itemsize == 1 and (item.ndim == 2 or (item.ndim == 4 and 3 in item.shape[1::2]))


def array(
    where: object, group: h5py.Group, name: str, dtype: Any = np.float32, *, ndim: int | None = None, at: Any = ()
) -> np.ndarray:
    """Read `numbers`, or their rows `at`, as `dtype` (None: the stored one). Raises DataError."""
    values = np.asarray(numbers(where, group, name, ndim)[at])
    with np.errstate(over="ignore"):  # what overflows becomes infinite, and is refused as such
        return values if dtype is None else values.astype(dtype, copy=False)


# Since 1.10 (2016) HDF5 checksums most of its structures, so that damage is noticed rather than believed.
LIBVER = ("v110", "v110")


@contextlib.contextmanager
def new_hdf5(path: Path) -> Iterator[tuple[h5py.File, Callable[[], None]]]:
    """Create an HDF5 file at `path`, synced at the end, and a function to call between large writes.

    That function and the end raise the OSError of an earlier write; the caller then removes `path`. Raises
    FileExistsError where `path` exists.
    """
    with _Output(path, "xb+") as output:
        with h5py.File(output, "w", libver=LIBVER) as file:
            yield file, output.check
        output.check()
        os.fsync(output.fileno())


class _Output(io.FileIO):
    """A file for h5py's driver for Python file objects, which seeks before each access.

    When a write fails (a full disk), the HDF5 library (seen with 2.0) cannot close the file any more and kills the
    process. So this object keeps the first error for `check` and reports success from then on.
    """

    _failure: BaseException | None = None

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    @contextlib.contextmanager
    def _attempt(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:  # a KeyboardInterrupt too
            self._failure = self._failure or error

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        done = len(view) if self._failure else 0
        with self._attempt():
            start = self.tell()
            while done < len(view):
                done += os.pwrite(self.fileno(), view[done:], start + done)
        return len(view)

    def readinto(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        view[:] = bytes(len(view))  # zeros behind the file's end
        with self._attempt():
            super().readinto(view)
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        length = self.tell() if size is None else size
        with self._attempt():
            super().truncate(length)
        return length


class _Opened:
    def __init__(self, path: Path) -> None:
        file = h5py.File(path, "r")
        self.close = file.close
        self.dataset = functools.cache(file.__getitem__)  # looking one up takes longer than reading a frame


open_files = OpenFiles(_Opened, 32)  # a data loader jumps between episodes
close_files = open_files.close


class Hdf5Frames(Frames):
    """Rows of dataset `name` at `ticks` int[M].

    `coded`: each is a JPEG file (or PNG) in one of the types of `file_bytes`, else an image uint8[H, W, 3].
    `swap`: the channels are stored as blue, green, red.
    """

    def __init__(
        self, path: Path, version: FileVersion, name: str, ticks: np.ndarray, shape: Any, *, coded: bool, swap: bool
    ) -> None:
        super().__init__(shape, np.arange(len(ticks)))
        self._path, self._version, self._name, self._ticks = path, version, name, ticks
        self._coded, self._swap = coded, swap

    def decode(self, at: int) -> np.ndarray:
        if self._coded:
            image = decode_image(self._file(at), self._where(at), self.shape[1:])
        else:
            image = self._read(at, at)
        return np.ascontiguousarray(image[..., ::-1]) if self._swap else image

    def encoded_at(self, at: int) -> bytes | None:
        if not self._coded or self._swap:  # with swapped channels the file is no image of RGB
            return None
        return encoded_file(self._file(at), self._where(at), self.shape[1:])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        n = len(self)
        if copy is False or self._coded or self._swap or n == 0 or (np.diff(self._at) != 1).any():
            return super().__array__(dtype, copy)
        first = int(self._at[0])
        out = self._read(first, slice(first, first + n))  # consecutive rows are read at once
        return out if dtype is None else out.astype(dtype)

    def _file(self, at: int) -> bytes:
        return file_bytes(self._read(at, at))

    def _where(self, at: int) -> str:
        return f"{self._path}: the frame at tick {int(self._ticks[at])} of {self._name}"

    def _read(self, at: int, rows: int | slice) -> np.ndarray:
        with file_faults(self._where(at), "the file is truncated or damaged", "Remove it or record it again"):
            return open_files.use(self._path, self._version, lambda file: file.dataset(self._name)[rows])


def file_bytes(element: Any) -> bytes:
    """Return the file in an element of a dataset: text or opaque bytes, of fixed or variable length, or uint8[L].

    Its length is what remains without the zeros that pad it: no JPEG or PNG file ends in one.
    """
    data = element if isinstance(element, bytes) else np.asarray(element).tobytes()
    return data.rstrip(b"\0")


def _holds_files(dataset: h5py.Dataset) -> bool:
    """Whether each row is the bytes of a file."""
    dtype = h5py.check_vlen_dtype(dataset.dtype) or dataset.dtype
    if dataset.ndim == 1 and dtype == dataset.dtype:
        return h5py.check_string_dtype(dtype) is not None or (dtype.kind == "V" and dtype.names is None)
    rows = dataset.ndim == 2 or dtype != dataset.dtype
    return bool(rows and dtype in (np.uint8, np.int8))


def _holds_images(dataset: h5py.Dataset) -> bool:
    return dataset.ndim == 4 and dataset.dtype == np.uint8 and dataset.shape[3] == 3


def is_image(dataset: h5py.Dataset) -> bool:
    """Return whether `frames_of` reads `dataset`: images, or files that begin as JPEG or PNG do."""
    if _holds_images(dataset) or not _holds_files(dataset) or not len(dataset):
        return _holds_images(dataset)
    return file_bytes(dataset[0]).startswith(IMAGE_FILES)


def arrays_in(where: object, group: h5py.Group, prefix: str = "") -> Iterator[tuple[str, ArrayInfo]]:
    """Every array in `group` and below; what cannot be read safely has no shape, and its fault is raised when it is."""
    for name in sorted(names(group)):
        try:
            item = member(where, group, name)
        except DataError:
            yield prefix + name, ArrayInfo("unreadable", (), bool(_CAMERA.search(name)))
            continue
        if isinstance(item, h5py.Group) and prefix.count("/") < _DEEPEST:
            yield from arrays_in(where, item, f"{prefix}{name}/")
        elif isinstance(item, h5py.Dataset):
            image = is_image(item)
            if image or item.dtype.kind in "biuf":
                yield prefix + name, ArrayInfo(str(item.dtype), item.shape, image)


def frames_of(path: Path, version: FileVersion, file: h5py.Group, name: str, ticks: np.ndarray, swap: bool) -> Frames:
    """Return the frames of dataset `name`, M rows at `ticks` int[M], raw or image files. Raises DataError."""
    dataset = dataset_of(path, file, name)
    if not _holds_images(dataset) and not _holds_files(dataset):
        raise DataError(
            f"{path}: {dataset.name} is {dataset.dtype}{list(dataset.shape)}, expected images uint8[T, H, W, 3], or a "
            "JPEG or PNG file in each row"
        )
    if len(dataset) != len(ticks):
        raise DataError(f"{path}: {dataset.name} has {len(dataset)} rows, its ticks have the shape {ticks.shape}")
    coded = dataset.ndim != 4 and len(dataset) > 0
    shape = dataset.shape[1:] if dataset.ndim == 4 else (0, 0, 3)
    if coded:
        first = f"{path}: the frame at tick {int(ticks[0])} of {name}"
        shape = (*image_size(file_bytes(dataset[0]), first), 3)
    return Hdf5Frames(path, version, dataset.name, ticks, shape, coded=coded, swap=swap)

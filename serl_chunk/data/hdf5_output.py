"""Writing an HDF5 file piece by piece to a disk that may be full.

When a write fails, the HDF5 library (seen with 2.0) cannot close the file any more and kills the process. Here it
never sees a failing write: it writes through an object that keeps the first error for our own code, and from then on
claims to write. That holds for every error of a disk, where reserving the space beforehand holds for a full one only
(and not on file systems that copy on write), and costs no second process and no copy of the file in memory.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py

# Since 1.10 (2016) HDF5 checksums most of its structures, so that damage is noticed rather than believed.
LIBVER = ("v110", "v110")


@contextlib.contextmanager
def new_hdf5(path: Path) -> Iterator[tuple[h5py.File, Callable[[], None]]]:
    """A new HDF5 file at `path`, on disk (synced) at the end, and a function to call between large writes.

    That function raises the OSError that a write so far has failed with; so does the end. What is at `path` then is no
    HDF5 file: the caller removes it. Raises FileExistsError where `path` exists.
    """
    with path.open("xb+", buffering=0) as raw:
        output = _Output(raw.fileno())
        with h5py.File(output, "w", libver=LIBVER) as file:
            yield file, output.check
        output.check()
        os.fsync(raw.fileno())


class _Output(io.RawIOBase):
    """What h5py's driver for Python file objects calls; none of its methods raises."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor, self._position = descriptor, 0
        self._failure: BaseException | None = None

    def check(self) -> None:
        """Raise what a call has failed with."""
        if self._failure is not None:
            raise self._failure

    def _attempt(self, call: Callable[[], Any]) -> None:
        if self._failure is None:
            try:
                call()
            except BaseException as error:  # a KeyboardInterrupt too; `check` raises it
                self._failure = error

    def write(self, data: Any) -> int:
        """Write at the position, all of it."""
        view, start = memoryview(data).cast("B"), self._position

        def call() -> None:
            done = 0
            while done < len(view):
                done += os.pwrite(self._descriptor, view[done:], start + done)

        self._attempt(call)
        self._position += len(view)
        return len(view)

    def readinto(self, data: Any) -> int:
        """Fill `data` from the position, with zeros behind the file's end."""
        view, start = memoryview(data).cast("B"), self._position
        view[:] = bytes(len(view))

        def call() -> None:
            there = os.pread(self._descriptor, len(view), start)
            view[: len(there)] = there

        self._attempt(call)
        self._position += len(view)
        return len(view)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """The new position."""
        if whence == os.SEEK_END:
            offset += os.fstat(self._descriptor).st_size
        self._position = self._position + offset if whence == os.SEEK_CUR else offset
        return self._position

    def tell(self) -> int:
        """The position."""
        return self._position

    def truncate(self, size: int | None = None) -> int:
        """Set the file's length."""
        length = self._position if size is None else size
        self._attempt(lambda: os.ftruncate(self._descriptor, length))
        return length

    def flush(self) -> None:
        """Nothing is held back."""

    def readable(self) -> bool:
        """Yes."""
        return True

    def writable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

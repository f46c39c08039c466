"""Segments of a run's journal, which its learner may drop while they are read."""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path
from typing import Any

from serl_chunk.transport.journal import SUFFIX
from serl_chunk.types import ConfigError, DataError

_LEFT = 64  # files that the rest of the process may want to open


class Segment:
    """One file of a journal. Nothing in it ever changes.

    Held, it stays readable when its learner has dropped it: an open file outlives its name, needs no place to be
    linked to, and leaves nothing behind where this process is killed. A copy in another process is not held.

    Args:
        folder: of the journal.
        number: of the segment.
    """

    def __init__(self, folder: Path, number: int) -> None:
        self.path, self._number, self._fd = folder / f"{number:020d}{SUFFIX}", number, -1

    def __reduce__(self) -> tuple[Any, ...]:
        return Segment, (self.path.parent, self._number)

    def __del__(self) -> None:
        self.release()

    def hold(self) -> None:
        """Keep it readable from now on. Raises OSError, and ConfigError where this process has too many files open."""
        if self._fd < 0:
            self._fd = _open(self.path)

    def release(self) -> None:
        """Let go of it; it is read by its name again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def read(self, offset: int, size: int, where: str) -> bytes:
        """`size` bytes from `offset` on, fewer at its end; raises DataError beginning with `where`."""
        try:
            if self._fd >= 0:
                return os.pread(self._fd, size, offset)
            with self.path.open("rb", buffering=0) as file:
                return os.pread(file.fileno(), size, offset)
        except FileNotFoundError:
            raise self.gone(where) from None
        except OSError as error:
            raise self.unreadable(where, error) from error

    def gone(self, where: str) -> DataError:
        """It is not there any more."""
        return DataError(
            f"{where}: {self.path} is there no more: the learner dropped it, because its replay does not need it "
            "(transport.journal_bytes keeps more). Leave the episode out (--skip-bad), or list the run's episodes again"
        )

    def unreadable(self, where: str, error: OSError) -> DataError:
        """It is there and cannot be read."""
        return DataError(f"{where}: {self.path} cannot be read: {error.strerror}")


def _open(path: Path) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != soft < fd + _LEFT:  # the usual 1024 is what select() bears, and we have no select()
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        if resource.RLIM_INFINITY != soft < fd + _LEFT:
            os.close(fd)
            raise ConfigError(
                f"{path.parent}: its segments are kept open while they are used, and this process may have {soft} "
                "files open at most: raise that (ulimit -n), or give a data set that `serl-chunk data export` wrote"
            )
    return fd

"""The folder of a journal: its one owner, its free space."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from pathlib import Path

from serl_chunk.types import ConfigError

LOCK = "lock"
_TRIES = 100


def lock_folder(folder: Path) -> int:
    """Create a folder where it is absent, and own it until the returned descriptor is closed.

    Raises ConfigError where another process owns it, OSError where it cannot be written.
    """
    for _ in range(_TRIES):
        # What is not found: the previous owner removes the folder at this moment.
        with contextlib.ExitStack() as stack, contextlib.suppress(FileNotFoundError):
            folder.mkdir(parents=True, exist_ok=True)
            fd = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
            stack.callback(os.close, fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as e:
                raise ConfigError(
                    f"{folder} is in use by another process. Stop that one, or choose another folder"
                ) from e
            if os.path.samestat(os.fstat(fd), os.stat(folder / LOCK)):
                stack.pop_all()
                return fd
    raise OSError(errno.EBUSY, "another process keeps removing it")


def remove_folder(folder: Path) -> None:
    """Delete a folder that the caller has locked. Raises OSError.

    The lock goes last: the next process that locks the folder must not lose what it writes there.
    """
    for path in sorted(folder.iterdir(), key=lambda p: p.name == LOCK):
        path.unlink()
    folder.rmdir()


def free_bytes(folder: Path) -> int:
    """Return the free bytes of a folder's disk; 0 where the system does not report them."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0

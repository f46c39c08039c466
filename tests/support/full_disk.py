"""A disk that is full for some writes."""

from __future__ import annotations

import errno
import os
from typing import Any

from serl_chunk.recording import recording as module
from serl_chunk.types import DataError


class FullDisk:
    """Raises in place of `write` while `full` is above 0, which each attempt lessens."""

    def __init__(self, write: Any, full: int) -> None:
        self._write, self.full = write, full

    def __call__(self, path: Any, *args: Any, **options: Any) -> None:
        if self.full > 0:
            self.full -= 1
            raise DataError(f"{path}: No space left on device") from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._write(path, *args, **options)


def full_disk(monkeypatch: Any, where: Any, name: str, *, full: int) -> FullDisk:
    """Put a full disk in place of the function `name` of the module `where`."""
    disk = FullDisk(getattr(where, name), full)
    monkeypatch.setattr(where, name, disk)
    monkeypatch.setattr(module, "AGAIN_S", 0.05)
    return disk

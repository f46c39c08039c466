"""Atomic and durable writes, formatted numbers, and log lines of conditions that last."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@contextlib.contextmanager
def atomic_path(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yield a temporary path next to `path`, which replaces `path` when the block ends without an error.

    A reader finds the old file or the new one, never a part. The temporary file is removed after an error. With
    `durable`, content and name are on disk at the end, so that they survive a power cut. Raises OSError.
    """
    part = path.with_name(f".{path.name}.part{os.getpid()}{path.suffix}")
    try:
        yield part
        if durable:
            fsync_path(part)
        os.replace(part, path)
        if durable:
            fsync_path(path.parent)
    finally:
        with contextlib.suppress(OSError):  # a read-only disk must not hide the error of the block
            part.unlink(missing_ok=True)


def atomic_write(path: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Write `content` to `path` through `atomic_path`. Text is written as UTF-8. Raises OSError."""
    with atomic_path(path, durable=durable) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)


def fsync_path(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def os_reason(error: Exception) -> str:
    """Return an error's reason, without the operating system's number and NumPy's advice to load a file unsafely."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    if "unsafely" in text:  # of every file without the marks of an archive or an array
        return "it is no archive, but a pickle or something else"
    return "it holds objects" if "allow_pickle" in text else text


@contextlib.contextmanager
def os_faults(error: type[Exception], text: str, remedy: str = "") -> Iterator[None]:
    """Raise an OSError of the block as `error`: the text, its reason in brackets, and what to do."""
    try:
        yield
    except OSError as cause:
        raise error(f"{text} ({os_reason(cause)}){remedy and f'. {remedy}'}") from cause


def folder_fault(path: Path, error: OSError) -> str:
    """Return why `path` cannot be used as a folder, and what to do."""
    file = next((part for part in (path, *path.parents) if part.is_file()), None)
    fault = f"{path}: cannot be used ({os_reason(error)})" if file is None else f"{file}: is a file, expected a folder"
    return f"{fault}. Choose another folder."


def allow_open_files(count: int) -> int:
    """Raise this process's limit of open files to `count`, as far as it may; return the limit, sys.maxsize for none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:  # the usual 1024 is what select() bears: there is none here
        wanted = hard if hard != resource.RLIM_INFINITY and hard < count else count
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def plural(count: int, noun: str) -> str:
    """`1 episode`, `2,000 episodes`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_spread(rates: Sequence[float]) -> str:
    """Say how success rates, 0..1, of several checkpoints spread: `mean 95.0 %, deviation 1.2, lowest 93.0 %, of 5`."""
    mean, deviation = 100 * statistics.mean(rates), 100 * statistics.pstdev(rates)
    return f"mean {mean:.1f} %, deviation {deviation:.1f}, lowest {100 * min(rates):.1f} %, of {len(rates)}"


def bytes_in(folder: Path) -> int:
    """Return the bytes of all files in a folder, which may be absent, or change meanwhile."""
    total = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += file.stat().st_size if file.is_file() else 0
    return total


def format_bytes(nbytes: float) -> str:
    """`512 B`, `1.5 KiB`, `20 MiB`: binary units, three digits at most before the point."""
    power = 0
    while abs(nbytes) >= 1000 and power < len(_BINARY_UNITS) - 1:
        nbytes, power = nbytes / 1024, power + 1
    unit = _BINARY_UNITS[power]
    return f"{nbytes:.0f} {unit}" if unit == "B" or abs(nbytes) >= 10 else f"{nbytes:.1f} {unit}"


def format_duration(seconds: float) -> str:
    """`0.4 s`, `12 s`, `3:05`, `1:02:03`."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Waiting:
    """A wait for a condition: polls, and logs why it lasts, at most once every `period` seconds.

    Args:
        clock: monotonic seconds.
        late: seconds until the first line is due.
        remedy_every: the first of so many lines has the remedy.
    """

    def __init__(
        self, logger: logging.Logger, period: float = 10.0, *, clock: Callable[[], float] = time.monotonic,
        late: float = 0.0, remedy_every: int = 6,
    ) -> None:  # fmt: skip
        self._logger, self._period, self._clock, self._remedy_every = logger, period, clock, remedy_every
        self._next, self._lines = clock() + late if late else -math.inf, 0

    def due(self) -> bool:
        """Return whether a line is due, which then counts as logged."""
        if (now := self._clock()) < self._next:
            return False
        self._next = now + self._period
        return True

    def log(self, text: str, remedy: str = "", *, level: int = logging.INFO) -> None:
        """The condition lasts: log `text`, where a line is due."""
        if self.due():
            due = remedy and self._lines % self._remedy_every == 0
            self._logger.log(level, text + (f". {remedy[:1].upper()}{remedy[1:]}" if due else ""))
            self._lines += 1

    def end(self) -> None:
        """The condition is over: the next line comes at once, with its remedy."""
        self._next, self._lines = -math.inf, 0

    def until(
        self, ready: Callable[[], object], over: Callable[[], object], poll: Callable[[], object],
        pause: Callable[[float], object] = time.sleep, every: float = 0.02,
    ) -> bool:  # fmt: skip
        """Call `poll` `every` few seconds until `ready`; returns False where the wait is `over` before."""
        while not ready():
            if over():
                return False
            poll()
            pause(every)
        return True

"""An append-only sequence of entries on disk, in segments: the learner's store and the actor's spool.

An entry is a list of frames with an increasing number. Once `append` returns it survives the death of this process,
and once it is *synced* a power cut. Opening a journal cuts a torn tail, which is one entry at most, skips damaged
entries, and moves files without a readable entry to `<folder>_damaged`; new numbers are above all that these, and a
newest file that a power cut shortened, may have held.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import itertools
import logging
import os
import re
import secrets
import shutil
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import xxhash

from serl_chunk.io import fsync_path
from serl_chunk.transport.storage import segment
from serl_chunk.transport.storage.segment import Buffer, Found
from serl_chunk.types import ConfigError, DataError, SerlChunkError

log = logging.getLogger(__name__)

LOCK = "lock"
_TRIES = 100
SUFFIX = ".journal"
DAMAGED = "_damaged"  # behind the name of a journal's folder: where files without a readable entry go
_IOV_MAX = 1024  # buffers that one writev takes
_MAX_FULL = 4  # segments that may wait for their fsync while the next is written: a slower disk slows the writer


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


def free_bytes(folder: Path) -> int:
    """Return the free bytes of a folder's disk; 0 where the system does not report them."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0


class JournalError(SerlChunkError):
    """An entry could not be written (a full or broken disk); nothing of it is in the journal."""


class Place(NamedTuple):
    """The location of an entry."""

    segment: int  # number of the segment's first entry, which names its file
    offset: int
    size: int


class Entry(NamedTuple):
    """One entry, as `read` yields it."""

    number: int
    place: Place
    frames: list[memoryview]  # read-only


class Losses(NamedTuple):
    """Damage that opening a journal met."""

    damaged: int = 0  # stretches of damaged bytes, each one entry or more, or a segment's beginning
    damaged_bytes: int = 0
    torn_bytes: int = 0  # cut from the end
    mended: tuple[Path, ...] = ()  # segments whose first sector was rewritten: nothing of them is lost
    aside: tuple[Path, ...] = ()  # new paths of segments without a readable entry

    def __str__(self) -> str:
        parts = [f"the damaged first sector of {path.name} was mended, no entry is lost" for path in self.mended]
        parts += [f"no entry of a file could be read: all of them are lost, it was moved to {p}" for p in self.aside]
        if self.torn_bytes:
            parts.append(f"an unfinished entry of {self.torn_bytes} bytes was cut from its end")
        if self.damaged:
            parts.append(f"{self.damaged} damaged stretches ({self.damaged_bytes} bytes) were skipped")
        return "; ".join(parts) or "whole"


def pack(number: int, frames: Sequence[Buffer], salt: int) -> tuple[list[Buffer], int]:
    """Return the buffers of an entry and their total size. The frames are not copied.

    Raises DataError for more frames, or larger ones, than an entry can hold.
    """
    lengths = [f.nbytes if isinstance(f, memoryview) else len(f) for f in frames]
    if len(lengths) > segment.MAX_FRAMES or max(lengths, default=0) > segment.MAX_FRAME_BYTES:
        raise DataError(
            f"an entry of {len(lengths)} frames, the largest of {max(lengths, default=0)} bytes, cannot be written: "
            f"at most {segment.MAX_FRAMES} frames of {segment.MAX_FRAME_BYTES} bytes can"
        )
    digest = xxhash.xxh3_64(seed=salt)
    for frame in frames:
        digest.update(frame)
    table = struct.pack(f"<{len(lengths)}I", *lengths)
    rest = segment.HEAD.pack(segment.MARKER, 0, digest.intdigest(), number, len(lengths))[segment.CHECKED :] + table
    head = segment.MARKER + struct.pack("<I", segment.check(rest, salt)) + rest
    return [head, *frames], len(head) + sum(lengths)


def write_all(fd: int, buffers: Sequence[Buffer]) -> None:
    """Write every byte, in as few calls as the system allows. Raises OSError, possibly after a part."""
    left = [memoryview(b).cast("B") for b in buffers if memoryview(b).nbytes]
    while left:
        done = os.writev(fd, left[:_IOV_MAX])
        if not done:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        while left and done >= left[0].nbytes:
            done -= left[0].nbytes
            del left[0]
        if done:
            left[0] = left[0][done:]


class SegmentWriter:
    """A new segment that one process appends entries to. Its methods raise OSError.

    An entry that could not be written leaves nothing: what could not be cut off is cut off before the next one.
    """

    def __init__(self, path: Path, first: int) -> None:
        self.first = first  # number of its first entry
        self.size = 0  # bytes of its header and its entries
        self.doubtful = False  # it was open when an fsync failed
        self.fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND, 0o600)
        self._salt = secrets.randbits(64)
        self._torn = False  # a part of an entry that could not be cut off follows the last whole one

    def begin(self) -> None:
        write_all(self.fd, [segment.header(self._salt)])
        self.size = segment.HEADER_BYTES

    def append(self, number: int, frames: Sequence[Buffer], sync_name: Callable[[], None] | None) -> tuple[int, int]:
        """Write one entry, and wait for the disk where `sync_name` is given; return its offset and size.

        Raises DataError for what no entry can hold.
        """
        buffers, total = pack(number, frames, self._salt)
        try:
            if self._torn:
                os.ftruncate(self.fd, self.size)
            self._torn = True
            write_all(self.fd, buffers)
            if sync_name is not None:
                sync_name()
                os.fsync(self.fd)
            self._torn = False
        except OSError:
            with contextlib.suppress(OSError):  # then the next one has to succeed in it
                os.ftruncate(self.fd, self.size)
                self._torn = False
            raise
        self.size += total
        return self.size - total, total


class Journal:
    """A folder of segments, opened by one process at a time. One thread appends and drops; `synced` is any thread's.

    Args:
        folder: created if absent.
        segment_bytes: a segment whose entries reached this size is followed by a new one; whole segments are dropped.
        sync_interval: seconds between fsyncs; 0 makes every `append` wait for one.
        preamble: frames for the first entry of every segment, so that dropping older ones loses no state.
        fence: raises where another process has taken the folder over; called before a segment is begun.
        taken_over: the newest segment is replaced by a copy: what its former owner, where that was no lock's business,
            still writes to it is nowhere.

    Raises ConfigError where another process has it open, JournalError where the folder cannot be written, DataError
    where a segment cannot be read or is of another format.
    """

    def __init__(
        self, folder: Path, *, segment_bytes: int = 64 << 20, sync_interval: float = 1.0,
        preamble: Callable[[], Sequence[Buffer]] | None = None, fence: Callable[[], None] | None = None,
        taken_over: bool = False,
    ) -> None:  # fmt: skip
        self.folder = folder
        self.first = self.next = 0  # entries first <= number < next are kept (damaged ones excepted)
        self.synced = 0  # entries below it survive a power cut
        self.nbytes = 0
        self.sync_error = ""  # why an fsync failed: `synced` stays until what is in doubt was written again
        self.lost = False  # some of that cannot be read any more: `synced` stays until the journal is opened again
        self._segment_bytes, self._preamble, self._fence = segment_bytes, preamble, fence
        self.segments: list[tuple[int, int, float]] = []  # (first number, bytes, wall time of its last entry)
        self._newest: SegmentWriter | None = None  # of the newest segment, where this process began it
        self._full: list[SegmentWriter] = []  # of older segments, which are to be synced and closed
        self._named = False  # the folder has a new name in it that is to be synced
        self._swap = threading.Lock()  # of the names of files and the above, held for a moment
        self._syncing = threading.Lock()  # held over an fsync: only its holder closes a segment
        self._lock: int | None = None
        try:
            with contextlib.ExitStack() as undo:
                self._lock = lock_folder(folder)
                undo.callback(os.close, self._lock)
                self.losses = self._recover()
                if taken_over and self.segments:
                    self._take_over(self._path(self.segments[-1][0]))
                undo.pop_all()
        except OSError as e:
            raise JournalError(f"{folder} cannot be written: {e.strerror}") from e
        self._sync_due, self._syncer = threading.Event(), None
        if sync_interval > 0:
            run = functools.partial(self._sync_regularly, sync_interval)
            self._syncer = threading.Thread(target=run, name="serl-chunk-journal", daemon=True)
            self._syncer.start()

    def _sync_regularly(self, interval: float) -> None:
        while self._lock is not None:
            self._sync_due.wait(interval)
            self._sync_due.clear()
            with contextlib.suppress(JournalError):  # logged, and tried again
                self.sync()

    def _recover(self) -> Losses:
        damaged = damaged_bytes = torn = 0
        paths = sorted(p for p in self.folder.glob(f"*{SUFFIX}") if re.fullmatch("[0-9]{20}", p.stem))
        mended = [path for path in paths if segment.mend(path)]
        aside: list[Path] = []
        for path, following in itertools.zip_longest(paths, paths[1:]):
            newest, first, size = following is None, int(path.stem), path.stat().st_size
            number, sound, lost = first, False, False
            for found in segment.scan(path):
                if isinstance(found, Found):
                    sound, number = True, found.number + 1
                elif found.torn and newest:
                    torn += found.size
                    os.truncate(path, found.offset)
                elif found.offset == 0 and found.size == size:
                    lost, number = True, first + segment.most_entries(size)
                else:
                    sound = True
                    damaged, damaged_bytes = damaged + 1, damaged_bytes + found.size
                    # Behind the last whole entry the number of lost ones is unknown.
                    past = found.numbers[1] if found.numbers else number + segment.most_entries(found.size)
                    number = max(number, past)
            if newest and (number == first or torn):  # the disk, and not a kill, may have cut it
                number += segment.most_entries((_MAX_FULL + 2) * self._segment_bytes)
            self.next = max(self.next, number if newest else min(number, int(following.stem)))
            stat = path.stat()
            if lost:
                aside.append(self._move_aside(path))
            elif not sound and newest:
                path.unlink()  # begun and never written to
            else:
                self.segments.append((first, stat.st_size, stat.st_mtime))
                self.nbytes += stat.st_size
        self.first = self.segments[0][0] if self.segments else self.next
        for first, _, _ in self.segments[-_MAX_FULL - 2 :]:  # a killed process synced all but these
            fsync_path(self._path(first))
        fsync_path(self.folder)
        self.synced = self.next
        return Losses(damaged, damaged_bytes, torn, tuple(mended), tuple(aside))

    def _take_over(self, path: Path) -> None:
        part = self.folder / f".{path.stem}.part"
        try:
            part.touch(0o600)
            part.write_bytes(segment.load(path))
            fsync_path(part)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        fsync_path(self.folder)

    def _move_aside(self, path: Path) -> Path:
        folder = self.folder.with_name(self.folder.name + DAMAGED)
        folder.mkdir(exist_ok=True)
        to = folder / f"{path.stem}_{time.time_ns()}{SUFFIX}"
        path.rename(to)
        fsync_path(folder)
        return to

    def read(self, segments: Iterable[int] | None = None) -> Iterator[Entry]:
        """Yield every sound entry, oldest first, of `segments` (first numbers) or of those that there are now.

        Another thread may append: to a segment that is none of those that this process found. Raises DataError.
        """
        for first in [first for first, _, _ in self.segments] if segments is None else segments:
            for found in segment.scan(self._path(first)):
                if isinstance(found, Found):
                    yield Entry(found.number, Place(first, found.offset, found.size), found.frames)

    def fetch(self, place: Place) -> list[memoryview]:
        """Return an entry's frames. Raises DataError where it is gone or damaged, JournalError for another time."""
        path = self._path(place.segment)
        try:
            with path.open("rb", buffering=0) as file:
                fd = file.fileno()
                data = os.pread(fd, place.size, place.offset)
                found = segment.parse(data, segment.salts(lambda at, size: os.pread(fd, size, at)))
        except OSError as e:
            kind = DataError if e.errno in (errno.EIO, errno.ENOENT) else JournalError
            raise kind(f"{path} cannot be read: {e.strerror}") from e
        if found is None:
            raise DataError(f"{path} is damaged at byte {place.offset}")
        return found.frames

    def skip_to(self, number: int) -> None:
        """Give no entry a number below `number`: entries below it, which a power cut took, are counted elsewhere."""
        self.next = max(self.next, number)
        if not self.segments:
            self.first = self.next

    def append(self, frames: Sequence[Buffer]) -> Place:
        """Write one entry. Raises JournalError, and DataError for what no entry can hold: nothing has changed then."""
        self.retire_doubtful()
        newest = self._newest
        if newest is None or newest.size - segment.HEADER_BYTES >= self._segment_bytes:
            newest = self._begin_segment()
        return self._write(newest, frames)

    def _write(self, newest: SegmentWriter, frames: Sequence[Buffer]) -> Place:
        at_once = self._syncer is None
        try:
            offset, total = newest.append(self.next, frames, self._sync_name if at_once else None)
        except OSError as e:
            raise JournalError(f"cannot write to {self._path(newest.first)}: {e.strerror}") from e
        self.segments[-1] = (newest.first, newest.size, time.time())
        self.nbytes += total
        self.next += 1
        if at_once:
            self.synced = self.next
        return Place(newest.first, offset, total)

    def _begin_segment(self) -> SegmentWriter:
        if len(self._full) + (self._newest is not None) > _MAX_FULL:  # the newest is left in any case
            self.sync()
        self._retire_segment()
        if self._fence is not None:
            self._fence()  # last: another process may have a segment of this number
        path = self._path(self.next)
        try:
            # A leftover of this number holds no sound entry, or `next` would be behind it.
            path.unlink(missing_ok=True)
            newest = self._newest = SegmentWriter(path, self.next)
            newest.begin()
            self._named = True
        except OSError as e:
            self._abandon(path)
            raise JournalError(f"cannot create {path}: {e.strerror}") from e
        self.segments.append((self.next, newest.size, time.time()))
        self.nbytes += newest.size
        if self._preamble is not None:
            try:
                self._write(newest, self._preamble())
            except BaseException:
                self.nbytes -= self.segments.pop()[1]
                self._abandon(path)
                raise
        return newest

    def _abandon(self, path: Path) -> None:
        self._retire_segment()
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)

    def retire_doubtful(self) -> None:
        """Write no more to the newest segment where an fsync of it failed. For the thread that appends."""
        if self._newest is not None and self._newest.doubtful:
            self._retire_segment()

    def _retire_segment(self) -> None:
        """Write no more to the newest segment; it is synced and closed soon, without waiting here."""
        with self._swap:
            if self._newest is not None:
                self._full.append(self._newest)
            self._newest = None
        if self._syncer is not None:
            self._sync_due.set()
        elif self._full:
            self.sync()

    def drop_before(self, number: int) -> int:
        """Delete every segment whose entries are all below `number`, except the newest. Returns the bytes freed."""
        pairs = itertools.pairwise(self.segments)
        return self.drop({first for (first, _, _), (following, _, _) in pairs if following <= number})

    def drop(self, firsts: Collection[int]) -> int:
        """Delete the segments with these first numbers, except the newest. Returns the bytes freed."""
        freed = 0
        for dropped in [s for s in self.segments[:-1] if s[0] in firsts]:
            path = self._path(dropped[0])
            try:
                with self._swap:
                    path.unlink(missing_ok=True)
                    self.segments.remove(dropped)
            except OSError as e:  # it stays until the next call
                log.warning("cannot remove %s: %s", path, e.strerror)
                break
            freed += dropped[1]
        self.nbytes -= freed
        self.first = self.segments[0][0] if self.segments else self.next
        return freed

    def sync(self) -> None:
        """Wait until everything written survives a power cut. Raises JournalError."""
        with self._syncing:
            with self._swap:
                number, full, newest = self.next, list(self._full), self._newest
            unsynced = full if newest is None else [*full, newest]
            try:
                self._sync_name()
                for each in unsynced:
                    if each.doubtful and each in full:
                        self._write_again(each.first)
                        each.doubtful = False
                    elif self.synced < number:
                        os.fsync(each.fd)
                if newest is not None and newest.doubtful:
                    raise OSError(errno.EIO, self.sync_error)  # until the thread that appends retires it
            except OSError as e:
                if not self.sync_error:
                    log.error("fsync of %s failed: %s", self.folder, e.strerror)
                for each in unsynced:
                    each.doubtful = True
                self.sync_error = self.sync_error or e.strerror or str(e)
                raise JournalError(f"fsync of {self.folder} failed: {e.strerror}") from e
            if not self.lost:
                if self.sync_error:
                    log.warning("%s: what was in doubt after a failed fsync is on disk now", self.folder)
                self.synced, self.sync_error = number, ""
            self._close(full)

    def _write_again(self, first: int) -> None:
        """Replace a segment by a copy. Raises OSError.

        The system reports a failed write once, and may drop what it holds of it: an fsync that succeeds afterwards
        proves nothing.
        """
        size = next((nbytes for number, nbytes, _ in self.segments.copy() if number == first), None)
        if size is None:  # it was dropped
            return
        path, part = self._path(first), self.folder / f".{first:020d}.part"
        if not segment.copy(path, part, size):
            log.error("%s: the system lost what it could not write before an fsync failed", path)
            self.lost = True
            return
        with self._swap:
            kept = any(number == first for number, _, _ in self.segments)
            part.replace(path) if kept else part.unlink()
        fsync_path(self.folder)

    def _sync_name(self) -> None:
        with self._swap:
            named, self._named = self._named, False
        try:
            if named:
                fsync_path(self.folder)
        except OSError:
            self._named = True
            raise

    def _close(self, full: Sequence[SegmentWriter]) -> None:
        with self._swap:
            for each in full:
                self._full.remove(each)
                with contextlib.suppress(OSError):  # a network disk repeats here the error of an fsync
                    os.close(each.fd)

    def close(self, *, remove: bool = False) -> None:
        """Sync and release the folder; with `remove`, delete it and everything in it first."""
        lock, self._lock = self._lock, None
        if lock is None:
            return
        if self._syncer is not None:
            self._sync_due.set()
            self._syncer.join()
        if self._newest is not None:
            self._full.append(self._newest)
            self._newest = None
        if not remove:
            with contextlib.suppress(JournalError):  # logged, and nothing more can be done
                self.sync()
        self._close(list(self._full))
        if remove:
            try:
                # The lock goes last: the next process that locks the folder must not lose what it writes there.
                for path in sorted(self.folder.iterdir(), key=lambda p: p.name == LOCK):
                    path.unlink()
                self.folder.rmdir()
            except OSError as e:
                log.warning("cannot remove %s: %s", self.folder, e.strerror)
        os.close(lock)

    def _path(self, first: int) -> Path:
        return self.folder / f"{first:020d}{SUFFIX}"

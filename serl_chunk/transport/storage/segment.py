"""The format of one file of a journal, and how it is read: entries of raw frames, each with checksums.

A segment begins with `MAGIC`, whose last byte is the number of the format, and a random salt, three times so that a
flipped bit does no harm. Both are repeated behind the first sector. A segment of another format is refused. An entry
is a head, the lengths of its frames, and the frames:

    marker  4 bytes   | finds the next entry behind a damaged one
    check   uint32    | of everything in the head behind it, and of the lengths
    digest  uint64    | of the frames
    number  uint64    | of the entry in its journal: a gap shows how many are lost
    frames  uint32    | how many
    length  uint32 each

Little-endian throughout; checksums are XXH3, seeded with the salt, so that bytes inside a frame cannot pass for an
entry. A killed process leaves a *torn tail*, an entry that is not finished. An entry whose checksum does not match is
*damaged*; those behind it are still read. Without a copy of the salt all of the file is damaged.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import xxhash

from serl_chunk.io import fsync_path
from serl_chunk.types import DataError

FORMAT = 6
MAGIC = b"SERLJRN" + bytes([FORMAT])
MARKER = b"\xa5\x5aJE"
HEAD = struct.Struct("<4sIQQI")
CHECKED = 8  # the part of the head behind marker and check starts here
_SALT = struct.Struct("<QQQ")
_SECTOR = 4096  # bytes that a disk gives back or does not
_COPY_BYTES = len(MAGIC) + _SALT.size
HEADER_BYTES = _SECTOR + _COPY_BYTES
MAX_FRAMES = 1 << 16
MAX_FRAME_BYTES = 2**32 - 1

log = logging.getLogger(__name__)

Buffer = bytes | memoryview
Read = Callable[[int, int], bytes | memoryview]  # (offset, size) -> that part of a segment; raises OSError


class Found(NamedTuple):
    """A whole entry of a segment."""

    number: int
    offset: int  # of its head, in the file
    size: int  # bytes in the file
    frames: list[memoryview]  # read-only views


class Damage(NamedTuple):
    """Bytes of a segment that are no entry."""

    offset: int
    size: int
    torn: bool  # the beginning of one entry, at the file's end: its writer was interrupted
    numbers: tuple[int, int] | None  # [first, past-last) of the entries lost, where both neighbours are known


def header(salt: int) -> bytes:
    """Return the beginning of a segment with this salt, bytes[HEADER_BYTES]."""
    copy = MAGIC + _SALT.pack(salt, salt, salt)
    return copy.ljust(_SECTOR, b"\0") + copy


def salts(read: Read) -> list[int]:
    """Return the salts that a segment may have, the likeliest first; one alone where a copy of it is sound."""
    found = []
    for at in (0, _SECTOR):
        copy = _copy(read, at)
        if _is_sound(copy):
            return [_majority(copy)]
        if len(copy) == _COPY_BYTES:
            found.append(_majority(copy))
    return found


def _copy(read: Read, at: int) -> bytes:
    try:
        return bytes(read(at, _COPY_BYTES))
    except OSError:
        return b""


def _majority(copy: bytes) -> int:
    a, b, c = _SALT.unpack_from(copy, len(MAGIC))
    return int((a & b) | (a & c) | (b & c))


def _is_sound(copy: bytes, magic: bytes = MAGIC) -> bool:
    """Whether a copy of magic and salt is undamaged."""
    return len(copy) == _COPY_BYTES and copy == magic + _SALT.pack(*[_majority(copy)] * 3)


def _check_format(path: Path, copies: Sequence[bytes]) -> None:
    """Raise DataError where copies of magic and salt are of another format, and none of this one."""
    if any(map(_is_sound, copies)):
        return
    for copy in copies:
        if copy.startswith(MAGIC[:-1]) and _is_sound(copy, copy[: len(MAGIC)]):
            raise DataError(
                f"{path}: journal format is {copy[len(MAGIC) - 1]} (expected {FORMAT}). Use the version of serl_chunk "
                f"that wrote it, or move {path.parent} away to continue without its records"
            )


def mend(path: Path) -> bool:
    """Rewrite a damaged first sector from the copy behind it. Returns whether that was needed and possible.

    Raises DataError for a file of another format.
    """
    try:
        with path.open("rb+", buffering=0) as file:
            fd = file.fileno()
            first, second = (_copy(lambda at, size: os.pread(fd, size, at), place) for place in (0, _SECTOR))
            _check_format(path, (first, second))
            if _is_sound(first) or not _is_sound(second):
                return False
            os.pwrite(fd, second.ljust(_SECTOR, b"\0"), 0)  # all of it: a part of a sector would have to be read first
            os.fsync(fd)
    except OSError as e:  # the copy of its salt serves, now and the next time
        log.warning("the first sector of %s cannot be mended: %s", path, e.strerror)
        return False
    return True


def copy(path: Path, to: Path, size: int) -> bool:
    """Write the first `size` bytes of a segment to another file, and wait for the disk; removes the copy and returns
    False where an entry cannot be read back. Raises OSError.
    """
    to.unlink(missing_ok=True)
    to.touch(0o600)
    to.write_bytes(path.read_bytes()[:size])
    fsync_path(to)
    if to.stat().st_size == size and all(isinstance(found, Found) for found in scan(to)):
        return True
    to.unlink()
    return False


def most_entries(nbytes: int) -> int:
    """Return more than the entries that so many damaged bytes can have held."""
    return nbytes // HEAD.size + 1


def scan(path: Path) -> Iterator[Found | Damage]:
    """Yield the entries of a file, all of it in memory, and the damage between.

    Raises DataError for a file that is unreadable or of another format.
    """
    data = load(path)
    size = len(data)
    if not size:
        return
    memory = memoryview(data)
    _check_format(path, [data[at : at + _COPY_BYTES] for at in (0, _SECTOR)])
    salt, pos = _beginning(data, memory)
    if salt is None:
        beginning = MAGIC if size < _COPY_BYTES else header(_majority(data))
        yield Damage(0, size, size < HEADER_BYTES and beginning.startswith(data[: len(beginning)]), None)
        return
    begin, last = (None if pos else 0), None  # of the damage that is being passed over; number of the last entry
    pos = pos or data.find(MARKER)
    while 0 <= pos < size:
        found = _entry(memory, pos, salt)
        number, end = (found.number, found.offset + found.size) if isinstance(found, Found) else found or (-1, size + 1)
        # A head whose entry runs past the end of the file is torn, or its file lost the rest.
        if end > size or (last is not None and number <= last):
            begin = pos if begin is None else begin
            pos = data.find(MARKER, pos + 1)
            continue
        if begin is not None:
            yield Damage(begin, pos - begin, False, None if last is None else (last + 1, number))
            begin = None
        if isinstance(found, Found):
            yield found
        else:
            yield Damage(pos, end - pos, False, (number, number + 1))
        last, pos = number, end
    if begin is not None:
        yield Damage(begin, size - begin, begin > 0 and _is_torn(memory, begin, salt), None)


def _beginning(data: bytes, memory: memoryview) -> tuple[int | None, int]:
    """Return (salt or None, offset of the first entry, 0 where the bytes before it are damaged).

    A salt that is not sound is right if it fits the head of any entry.
    """
    found = salts(lambda at, size: memory[at : at + size])
    if found and data.startswith(header(found[0])):
        return found[0], HEADER_BYTES
    for salt in found:
        if any(_entry(memory, match.start(), salt) is not None for match in re.finditer(re.escape(MARKER), data)):
            return salt, 0
    return None, 0


def _is_torn(memory: memoryview, pos: int, salt: int) -> bool:
    """Whether the rest of a file is the beginning of one entry, whose `append` thus never returned."""
    rest = memory[pos:]
    if len(rest) < HEAD.size:
        return True
    marker, _, _, _, count = HEAD.unpack_from(rest)
    if marker != MARKER or count > MAX_FRAMES:
        return False
    found = _entry(memory, pos, salt)
    cut = found is not None and not isinstance(found, Found) and found[1] > len(memory)
    return cut or HEAD.size + 4 * count > len(rest)


def parse(data: bytes, candidates: Sequence[int]) -> Found | None:
    """Return the entry that `data` begins with; None where it is damaged. `candidates`: from `salts`."""
    entries = (_entry(memoryview(data), 0, salt) for salt in candidates)
    return next((found for found in entries if isinstance(found, Found)), None)


def check(rest: Buffer, salt: int) -> int:
    """Return the checksum of an entry's head from CHECKED on, with the lengths behind it."""
    return xxhash.xxh3_64_intdigest(rest, seed=salt) & 0xFFFFFFFF


def _entry(memory: memoryview, pos: int, salt: int) -> Found | tuple[int, int] | None:
    """Return the entry at `pos`; (number, end) where its frames are damaged or missing; None without a sound head."""
    frames_at = pos + HEAD.size
    if frames_at > len(memory):
        return None
    marker, sum_, digest, number, count = HEAD.unpack_from(memory, pos)
    if marker != MARKER or count > MAX_FRAMES:
        return None
    body = frames_at + 4 * count
    if body > len(memory) or check(memory[pos + CHECKED : body], salt) != sum_:
        return None
    lengths = struct.unpack_from(f"<{count}I", memory, frames_at)
    end = body + sum(lengths)
    if end > len(memory) or xxhash.xxh3_64_intdigest(memory[body:end], seed=salt) != digest:
        return number, end
    ends = itertools.accumulate(lengths, initial=body)
    frames = [memory[start:stop] for start, stop in itertools.pairwise(ends)]
    return Found(number, pos, end - pos, frames)


def load(path: Path) -> bytes:
    """Read a file; unreadable sectors become zeros, which no checksum accepts."""
    try:
        return path.read_bytes()
    except OSError as e:
        if e.errno != errno.EIO:
            raise DataError(f"{path} cannot be read: {e.strerror}") from e
    with path.open("rb") as file:
        fd, data = file.fileno(), bytearray(path.stat().st_size)
        for at in range(0, len(data), _SECTOR):
            with contextlib.suppress(OSError):
                sector = os.pread(fd, min(_SECTOR, len(data) - at), at)
                data[at : at + len(sector)] = sector
        return bytes(data)

"""One file of a journal: entries of raw frames, each with checksums, appended and never changed.

A segment begins with `MAGIC` and a random salt, written three times so that a flipped bit in it does no harm. An entry
is a head, the lengths of its frames, and the frames:

    marker  4 bytes   | finds the next entry behind a damaged one
    check   uint32    | of everything in the head behind it, and of the lengths
    digest  uint64    | of the frames
    number  uint64    | of the entry in its journal: a hole shows how many are lost
    frames  uint32    | how many
    length  uint32 each

Little-endian throughout; checksums are XXH3, seeded with the salt: bytes inside a frame that look like an entry are
none, whatever their origin. A file that ends inside an entry has a *torn tail*, which is what a killed process leaves;
an entry whose checksum does not match is *damaged*, and those behind it are still read.
"""

from __future__ import annotations

import errno
import os
import secrets
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import xxhash

from serl_chunk.types import DataError

MAGIC = b"SERLJRN\x01"
MARKER = b"\xa5\x5aJE"
_HEAD = struct.Struct("<4sIQQI")
_CHECKED = 8  # the part of the head behind marker and check starts here
_SALT = struct.Struct("<QQQ")
HEADER_BYTES = len(MAGIC) + _SALT.size
MAX_FRAMES = 1 << 16
_MAX_FRAME_BYTES = 2**32 - 1
_SECTOR = 4096  # bytes that a disk gives back or does not

Buffer = bytes | memoryview


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
    torn: bool  # nothing whole follows: the writer was interrupted here
    numbers: tuple[int, int] | None  # [first, past-last) of the entries lost, where both neighbours are known


def new_salt() -> int:
    """A random salt, for a new segment."""
    return secrets.randbits(64)


def header(salt: int) -> bytes:
    """What a segment with this salt begins with, bytes[HEADER_BYTES]."""
    return MAGIC + _SALT.pack(salt, salt, salt)


def salt_of(data: bytes | memoryview) -> int:
    """The salt in a segment's first bytes, by majority of its copies; 0 where there are too few bytes."""
    if len(data) < HEADER_BYTES:
        return 0
    a, b, c = _SALT.unpack_from(data, len(MAGIC))
    return int((a & b) | (a & c) | (b & c))


def pack(number: int, frames: Sequence[Buffer], salt: int) -> tuple[list[Buffer], int]:
    """Buffers that append one entry, and their total size. The frames are not copied.

    Raises DataError for more frames, or larger ones, than an entry can hold.
    """
    lengths = [f.nbytes if isinstance(f, memoryview) else len(f) for f in frames]
    if len(lengths) > MAX_FRAMES or max(lengths, default=0) > _MAX_FRAME_BYTES:
        raise DataError(
            f"an entry of {len(lengths)} frames, the largest of {max(lengths, default=0)} bytes, cannot be written: "
            f"at most {MAX_FRAMES} frames of {_MAX_FRAME_BYTES} bytes can"
        )
    digest = xxhash.xxh3_64(seed=salt)
    for frame in frames:
        digest.update(frame)
    table = struct.pack(f"<{len(lengths)}I", *lengths)
    rest = _HEAD.pack(MARKER, 0, digest.intdigest(), number, len(lengths))[_CHECKED:] + table
    head = MARKER + struct.pack("<I", _check(rest, salt)) + rest
    return [head, *frames], len(head) + sum(lengths)


def scan(path: Path) -> Iterator[Found | Damage]:
    """Every entry of a file, and what between them is none. Raises DataError where it cannot be read at all.

    The file is held in memory, for as long as any of the frames is.
    """
    data = _load(path)
    size = len(data)
    if not size:
        return
    memory, salt = memoryview(data), salt_of(data)
    pos, last = HEADER_BYTES, None
    begin = None if data[:HEADER_BYTES] == header(salt) else 0  # of the damage that is being passed over
    while pos < size:
        found = _entry(memory, pos, salt)
        number, end = (found.number, found.offset + found.size) if isinstance(found, Found) else found or (-1, size + 1)
        # A head whose entry runs past the end of the file is torn, or its file lost the rest.
        if end > size or (last is not None and number <= last):
            begin = pos if begin is None else begin
            pos = data.find(MARKER, pos + 1)
            if pos < 0:
                break
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
        yield Damage(begin, size - begin, True, None)


def parse(data: bytes, salt: int) -> Found | None:
    """The entry that `data` begins with, where that is whole and undamaged."""
    found = _entry(memoryview(data), 0, salt)
    return found if isinstance(found, Found) else None


def _check(rest: Buffer, salt: int) -> int:
    return xxhash.xxh3_64_intdigest(rest, seed=salt) & 0xFFFFFFFF


def _entry(memory: memoryview, pos: int, salt: int) -> Found | tuple[int, int] | None:
    """The entry at `pos`; (number, end) where only its frames are damaged or missing; None where there is no head."""
    frames_at = pos + _HEAD.size
    if frames_at > len(memory):
        return None
    marker, check, digest, number, count = _HEAD.unpack_from(memory, pos)
    if marker != MARKER or count > MAX_FRAMES:
        return None
    body = frames_at + 4 * count
    if body > len(memory) or _check(memory[pos + _CHECKED : body], salt) != check:
        return None
    lengths = struct.unpack_from(f"<{count}I", memory, frames_at)
    end = body + sum(lengths)
    if end > len(memory) or xxhash.xxh3_64_intdigest(memory[body:end], seed=salt) != digest:
        return number, end
    frames = []
    for length in lengths:
        frames.append(memory[body : body + length])
        body += length
    return Found(number, pos, end - pos, frames)


def _load(path: Path) -> bytes:
    """A file's content; sectors that the disk does not give back are zeros, which no checksum accepts."""
    try:
        return path.read_bytes()
    except OSError as e:
        if e.errno != errno.EIO:
            raise DataError(f"{path} cannot be read: {e.strerror}") from e
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        return b"".join(_sector(file.fileno(), at, min(_SECTOR, size - at)) for at in range(0, size, _SECTOR))


def _sector(fd: int, at: int, size: int) -> bytes:
    try:
        return os.pread(fd, size, at).ljust(size, b"\0")
    except OSError:
        return bytes(size)

"""Parts of a record that is too large for one message, as messages.

A part is a range of the bytes of a record's frames. Parts are sent in order, and each is acknowledged. The largest one
holds a full block of steps, so that on a fast link only single steps with large images travel in parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from serl_chunk_robot.wire import codec
from serl_chunk_robot.wire.codec import Frame, Limits, Message, WireError

PART = "part"
MAX_PART_BYTES = (1 << 20) + (1 << 16)  # and so of a frame on the data channel: what is larger travels in parts


class Part(NamedTuple):
    """A range of a record's bytes."""

    first: int  # lowest sequence number of the record
    span: int  # sequence numbers it takes
    sizes: tuple[int, ...]  # bytes of each of its frames
    offset: int  # of `data` in these frames together
    data: np.ndarray  # uint8[bytes]

    @property
    def end(self) -> int:
        return self.first + self.span


def encode_part(first: int, span: int, frames: Sequence[Frame], offset: int, nbytes: int) -> list[Frame]:
    """Return the part of a record that begins at byte `offset`; not copied where it lies within one frame."""
    buffers = [codec.buffer_of(f) for f in frames]
    header = {"first": first, "span": span, "sizes": [b.nbytes for b in buffers], "offset": offset}
    pieces, start, end = [], 0, offset + nbytes
    for b in buffers:
        if start < end and offset < start + b.nbytes:
            pieces.append(b[max(0, offset - start) : end - start])
        start += b.nbytes
    data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    return codec.encode(PART, header, {"data": np.frombuffer(data, np.uint8)})


def decode_part(message: Message, limits: Limits) -> Part:
    """Return the part in a message. Raises WireError, also for a part of a record beyond the limits."""
    h = message.header
    sizes = codec.field(h, "sizes", list)
    if not 1 <= len(sizes) <= limits.max_arrays + 1:
        raise WireError(f"a part of a record of {len(sizes) - 1} arrays; the limit is {limits.max_arrays}")
    if any(type(n) is not int or n < 0 for n in sizes):
        raise WireError("a part's record has frames whose sizes are non-negative integers")
    total = sum(sizes)
    if total > limits.max_message_bytes:
        raise WireError(f"a part of a record of {total} bytes; the limit is {limits.max_message_bytes}")
    part = Part(
        codec.count(h, "first"), codec.count(h, "span"), tuple(sizes), codec.count(h, "offset"),
        message.arrays.get("data", np.empty(0, np.uint8)),
    )  # fmt: skip
    if part.data.dtype != np.uint8 or part.data.ndim != 1 or not part.data.size or len(message.arrays) != 1:
        raise WireError("a part carries one array, uint8[bytes], and not an empty one")
    if part.span < 1 or part.offset + part.data.size > total:
        raise WireError(f"a part of {part.data.size} bytes from {part.offset} lies outside its record of {total} bytes")
    return part


class Assembly:
    """The parts of one record that have arrived. `first` and `received` are where the sender continues."""

    def __init__(self, part: Part) -> None:
        self.first = part.first
        self.received = 0  # bytes
        self._sizes = part.sizes
        self._bytes = np.empty(sum(part.sizes), np.uint8)  # the system gives the memory as parts are written into it

    @property
    def nbytes(self) -> int:
        return len(self._bytes)

    def add(self, part: Part) -> bool:
        """Add a part; False where it leaves a gap or is of another record. A repeated one is ignored."""
        end = part.offset + part.data.size
        if (part.first, part.sizes) != (self.first, self._sizes) or part.offset > self.received:
            return False
        if end > self.received:
            self._bytes[part.offset : end] = part.data
            self.received = end
        return True

    def frames(self) -> list[Frame] | None:
        if self.received < len(self._bytes):
            return None
        whole, ends = self._bytes.data.toreadonly(), itertools.accumulate(self._sizes)
        return [whole[end - n : end] for n, end in zip(self._sizes, ends, strict=True)]

"""Snapshots: announced by a manifest of leaf digests, pulled in pieces, newest only.

The actor requests ranges of the leaves whose digests it lacks, several pieces in flight. A range names a digest and no
version: what arrived of a leaf serves every manifest that lists its digest, also one of a restarted learner.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import xxhash

from serl_chunk.types import PolicyOrigin
from serl_chunk_robot.wire import codec
from serl_chunk_robot.wire.codec import Message, WireError

MANIFEST, PIECE, GONE = "manifest", "piece", "gone"  # from the server
REQUESTS = SUBSCRIBE, PULL, RELEASE = "subscribe", "pull", "release"  # from the client
MAX_RANGES = 64  # ranges of leaves in one piece
MAX_LEAVES = 100_000
MAX_BYTES = 1 << 36  # of a snapshot: what is announced is allocated before it arrives
DIGEST_BYTES = 16


class Leaf(NamedTuple):
    """One array of a snapshot, as the manifest describes it."""

    path: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    digest: bytes  # of dtype, shape and content

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class Range(NamedTuple):
    """`length` bytes of the leaf with this digest, from byte `offset`."""

    digest: bytes
    offset: int
    length: int


def decode_ranges(header: Mapping[str, Any]) -> tuple[Range, ...]:
    """Return the ranges of a pull, a piece or a `gone`. Raises WireError."""
    rows = codec.field(header, "ranges", list)
    if not 1 <= len(rows) <= MAX_RANGES:
        raise WireError(f"{len(rows)} ranges in a message, expected 1..{MAX_RANGES}")
    for row in rows:
        valid = isinstance(row, list) and len(row) == 3 and isinstance(row[0], bytes)
        if not valid or any(type(n) is not int or n < 0 for n in row[1:]):
            raise WireError("a range is [digest, offset, length], the last two non-negative integers")
    return tuple(Range(*row) for row in rows)


class Manifest(NamedTuple):
    """The leaves of one snapshot."""

    version: int
    info: dict[str, Any]
    leaves: tuple[Leaf, ...]
    narrowed: frozenset[int] = frozenset()  # leaves that are float32 on both sides and travel as bfloat16
    origin: PolicyOrigin = PolicyOrigin()

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves)

    def header(self) -> dict[str, Any]:
        leaves = [(leaf.path, codec.dtype_name(leaf.dtype), leaf.shape, leaf.digest) for leaf in self.leaves]
        narrowed = sorted(self.narrowed)
        return {"version": self.version, "info": self.info, "leaves": leaves, "narrowed": narrowed,
                **self.origin._asdict()}  # fmt: skip

    @classmethod
    def decode(cls, message: Message) -> Manifest:
        h = message.header
        rows = codec.field(h, "leaves", list)
        if len(rows) > MAX_LEAVES:
            raise WireError(f"a manifest of {len(rows)} leaves; the limit is {MAX_LEAVES}")
        leaves = []
        kinds: dict[bytes, tuple[Any, ...]] = {}
        for row in rows:
            if not isinstance(row, list) or len(row) != 4 or not isinstance(row[3], bytes):
                raise WireError("a leaf is not described by [path, dtype, shape, digest]")
            leaf = Leaf(*codec.table_row(row[:3]), row[3])
            if len(leaf.digest) != DIGEST_BYTES or kinds.setdefault(leaf.digest, leaf[1:3]) != leaf[1:3]:
                raise WireError(f"the digest of {leaf.path} is not one of its dtype, shape and content")
            leaves.append(leaf)
        if len({leaf.path for leaf in leaves}) != len(leaves):
            raise WireError("a manifest lists a path twice")
        narrowed = codec.field(h, "narrowed", list)
        bfloat16 = codec.DTYPES["bfloat16"]
        if any(type(i) is not int or not 0 <= i < len(leaves) or leaves[i].dtype != bfloat16 for i in narrowed):
            raise WireError("a manifest narrows leaves that are not bfloat16")
        origin = PolicyOrigin(codec.text(h, "run", 128), codec.text(h, "normaliser", 64))
        version, info = codec.field(h, "version", int), codec.field(h, "info", dict)
        manifest = cls(version, info, tuple(leaves), frozenset(narrowed), origin)
        if manifest.nbytes > MAX_BYTES:
            raise WireError(f"a manifest of {manifest.nbytes} bytes; the limit is {MAX_BYTES}")
        return manifest


def new_digest(dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
    """Return the digest of an array, to be updated with its content: it finds equal leaves and broken transfers."""
    return xxhash.xxh3_128(f"{codec.dtype_name(dtype)}{shape}".encode())

"""Snapshots: announced by a manifest of leaf digests, pulled in pieces, newest only.

The actor requests ranges of the leaves whose digests it lacks, several pieces in flight. A range names a digest and no
version: what arrived of a leaf serves every manifest that lists its digest, also one of a restarted learner.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import xxhash

from serl_chunk.types import PolicyOrigin, Snapshot
from serl_chunk_robot.wire import codec
from serl_chunk_robot.wire.codec import Frame, Message, WireError

logger = logging.getLogger(__name__)

MANIFEST, PIECE, GONE = "manifest", "piece", "gone"  # from the server
SUBSCRIBE, PULL, RELEASE = "subscribe", "pull", "release"  # from the client
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


def _digest(dtype: np.dtype[Any], shape: tuple[int, ...], data: np.ndarray) -> bytes:
    """Identify equal leaves and broken transfers. Strangers are kept out by keys."""
    digest = xxhash.xxh3_128(f"{codec.dtype_name(dtype)}{shape}".encode())
    digest.update(data.data)
    return digest.digest()


class Published:
    """A snapshot at the server: its manifest and its bytes."""

    def __init__(
        self, snapshot: Snapshot, info: dict[str, Any], previous: Published | None = None, *, narrow: bool = False
    ) -> None:
        """Hash every leaf (about 2 ms for 10 MB, without the interpreter's lock). Raises WireError for a dtype.

        Args:
            snapshot: contiguous arrays are not copied and must not change afterwards.
            previous: a leaf that did not change since shares its memory.
            narrow: send float32 as bfloat16, in half the bytes. The actor gets float32 with 8 bits of mantissa.
        """
        known: dict[bytes, np.ndarray] = {} if previous is None else previous.leaves
        self.leaves: dict[bytes, np.ndarray] = {}  # uint8[bytes] by digest
        leaves: list[Leaf] = []
        narrowed = set()
        for path, value in snapshot.params.items():
            array = np.asarray(value)
            if narrow and array.dtype == np.float32:
                narrowed.add(len(leaves))
                array = array.astype(codec.DTYPES["bfloat16"])
            dtype = codec.DTYPES[codec.dtype_name(array.dtype, path)]
            data = codec.raw_bytes(array)
            digest = _digest(dtype, array.shape, data)
            self.leaves[digest] = known.get(digest, data)
            leaves.append(Leaf(path, dtype, array.shape, digest))
        self.manifest = Manifest(snapshot.version, info, tuple(leaves), frozenset(narrowed), snapshot.origin)
        self.announcement: list[Frame] = codec.encode(MANIFEST, self.manifest.header())


def answer_pull(request: Message, published: Iterable[Published], max_bytes: int) -> list[Frame]:
    """Return the piece that a pull requests, or a `gone` where a leaf is in none of `published`. Raises WireError."""
    rows, stores = request.header.get("ranges"), list(published)
    views: dict[str, np.ndarray] = {}
    total = 0
    for i, (digest, offset, length) in enumerate(decode_ranges(request.header)):
        data = next((p.leaves[digest] for p in stores if digest in p.leaves), None)
        if data is None:
            return codec.encode(GONE, {"ranges": rows})
        if offset + length > len(data):
            raise WireError(f"bytes {offset} to {offset + length} lie outside a leaf of {len(data)} bytes")
        total += length
        views[str(i)] = data[offset : offset + length]
    if total > max_bytes:
        raise WireError(f"a pull requests {total} bytes at once; the limit is {max_bytes}")
    return codec.encode(PIECE, {"ranges": rows}, views)


class Pull:
    """A snapshot on its way in: the leaves that arrived, the ranges that are requested, the ranges that are left."""

    def __init__(self, manifest: Manifest, held: Mapping[bytes, np.ndarray], earlier: Pull | None = None) -> None:
        """`held`: complete leaves by digest, not requested. `earlier`: a pull given up, whose equal leaves are kept."""
        self.manifest = manifest
        self._leaves = {leaf.digest: leaf for leaf in manifest.leaves}  # equal leaves are requested once
        known = held if earlier is None else {**held, **earlier.arrived}
        self.arrived: dict[bytes, np.ndarray] = {digest: known[digest] for digest in self._leaves if digest in known}
        # Every byte that is missing is of one range: one that is left, or one that is requested.
        self._buffers: dict[bytes, np.ndarray] = {}
        self._missing: dict[bytes, int] = {}  # bytes
        self._left: collections.deque[Range] = collections.deque()
        self._requested: dict[tuple[Range, ...], tuple[Range, ...]] = {}  # request -> what of it is wanted
        for digest in self._leaves:
            if earlier is not None and digest in earlier._missing:
                self._buffers[digest], self._missing[digest] = earlier._buffers[digest], earlier._missing[digest]
            elif digest not in self.arrived:
                self._begin(digest)
        if earlier is not None:
            common = earlier._missing.keys() & self._missing.keys()
            self._left.extendleft(r for r in reversed(earlier._left) if r.digest in common)
            for ranges, wanted in earlier._requested.items():
                self._requested[ranges] = tuple(r for r in wanted if r.digest in common)

    def _begin(self, digest: bytes) -> None:
        nbytes = self._leaves[digest].nbytes
        buffer = np.empty(nbytes, np.uint8)
        if not nbytes:
            self.arrived[digest] = buffer
            return
        self._buffers[digest], self._missing[digest] = buffer, nbytes
        self._left.append(Range(digest, 0, nbytes))

    @property
    def complete(self) -> bool:
        """Whether every leaf has arrived, and no request is open, be it of an earlier manifest."""
        return not self._missing and not self._requested

    def request(self, nbytes: int) -> tuple[Range, ...] | None:
        """Return the next ranges to request, of at most `nbytes` together; None where everything is requested."""
        group: list[Range] = []
        while self._left and nbytes and len(group) < MAX_RANGES:
            digest, offset, left = self._left.popleft()
            length = min(nbytes, left)
            group.append(Range(digest, offset, length))
            if length < left:
                self._left.appendleft(Range(digest, offset + length, left - length))
            nbytes -= length
        ranges = tuple(group)
        if ranges:
            self._requested[ranges] = ranges
        return ranges or None

    def put_back(self, ranges: tuple[Range, ...]) -> bool:
        """Leave ranges that were not sent, or that the server lacks, to another request. False: none is needed."""
        wanted = self._requested.pop(ranges, ())
        self._left.extendleft(reversed(wanted))
        return bool(wanted)

    def restart(self) -> None:
        for ranges in list(self._requested):
            self.put_back(ranges)

    def receive(self, message: Message) -> tuple[Range, ...] | None:
        """Take in a piece and return its ranges; None for one that is not awaited. Raises WireError."""
        ranges = decode_ranges(message.header)
        if ranges not in self._requested:
            return None
        pieces = list(message.arrays.values())
        if [(a.dtype, a.shape) for a in pieces] != [(np.uint8, (r.length,)) for r in ranges]:
            found = ", ".join(f"{a.dtype} {a.shape}" for a in pieces) or "nothing"
            raise WireError(f"a piece of {', '.join(str(r.length) for r in ranges)} bytes arrived as {found}")
        wanted = self._requested.pop(ranges)
        for r, data in zip(ranges, pieces, strict=True):
            if r not in wanted:
                continue  # of an earlier manifest
            digest, offset, length = r
            self._buffers[digest][offset : offset + length] = data
            self._missing[digest] -= length
            if not self._missing[digest]:
                self._finish(digest)
        return ranges

    def _finish(self, digest: bytes) -> None:
        leaf, data = self._leaves[digest], self._buffers.pop(digest)
        del self._missing[digest]
        if _digest(leaf.dtype, leaf.shape, data) == digest:
            self.arrived[digest] = data
        else:
            logger.error("%s of snapshot %d arrived damaged and is requested again", leaf.path, self.manifest.version)
            self._begin(digest)

    def result(self) -> Snapshot:
        """Return the complete snapshot; its arrays are read-only."""
        params = {}
        for i, leaf in enumerate(self.manifest.leaves):
            array = self.arrived[leaf.digest].view(leaf.dtype).reshape(leaf.shape)
            if i in self.manifest.narrowed:
                array = array.astype(np.float32)
            array.flags.writeable = False
            params[leaf.path] = array
        return Snapshot(self.manifest.version, params, origin=self.manifest.origin)

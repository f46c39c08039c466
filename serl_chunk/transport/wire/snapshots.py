"""Snapshots: announced by a manifest of leaf digests, pulled in pieces, newest only.

The learner publishes; the server announces the manifest; the client pulls the leaves it lacks, several pieces in
flight. A pull that began completes, whatever is published meanwhile; then the newest is next, so a slow client
never works through old ones. The server answers each request from memory and keeps no state of a pull but the
snapshot it is about.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import xxhash

from serl_chunk.transport.wire import codec
from serl_chunk.transport.wire.codec import Frame, Message, WireError
from serl_chunk.types import PolicyOrigin, Snapshot

MANIFEST, PIECE, GONE = "manifest", "piece", "gone"  # from the server
SUBSCRIBE, PULL, RELEASE = "subscribe", "pull", "release"  # from the client
MAX_RANGES = 64  # ranges of leaves in one piece
MAX_LEAVES = 100_000
MAX_BYTES = 1 << 36  # of a snapshot: what is announced is allocated before it arrives


class Leaf(NamedTuple):
    """One array of a snapshot, as the manifest describes it."""

    path: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    digest: bytes  # of dtype, shape and content

    @property
    def nbytes(self) -> int:
        """Bytes of its content."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class Range(NamedTuple):
    """`length` bytes of leaf number `leaf`, from byte `offset`."""

    leaf: int
    offset: int
    length: int


class Manifest(NamedTuple):
    """What a snapshot consists of. `key` names it in pull requests."""

    key: str
    version: int
    info: dict[str, Any]
    leaves: tuple[Leaf, ...]
    narrowed: frozenset[int] = frozenset()  # leaves that are float32 on both sides and travel as bfloat16
    origin: PolicyOrigin = PolicyOrigin()

    def header(self) -> dict[str, Any]:
        """Its fields for a message."""
        leaves = [(leaf.path, codec.dtype_name(leaf.dtype), leaf.shape, leaf.digest) for leaf in self.leaves]
        return {
            "key": self.key,
            "version": self.version,
            "info": self.info,
            "leaves": leaves,
            "narrowed": sorted(self.narrowed),
            **self.origin._asdict(),
        }

    @classmethod
    def decode(cls, message: Message) -> Manifest:
        """The manifest in a message; raises WireError."""
        h = message.header
        rows = codec.field(h, "leaves", list)
        if len(rows) > MAX_LEAVES:
            raise WireError(f"a manifest of {len(rows)} leaves; the limit is {MAX_LEAVES}")
        leaves = []
        for row in rows:
            if not isinstance(row, list) or len(row) != 4 or not isinstance(row[3], bytes):
                raise WireError("a leaf is not described by [path, dtype, shape, digest]")
            leaves.append(Leaf(*codec.table_row(row[:3]), row[3]))
        if len({leaf.path for leaf in leaves}) != len(leaves):
            raise WireError("a manifest lists a path twice")
        if (total := sum(leaf.nbytes for leaf in leaves)) > MAX_BYTES:
            raise WireError(f"a manifest of {total} bytes; the limit is {MAX_BYTES}")
        version = codec.field(h, "version", int)
        narrowed = codec.field(h, "narrowed", list)
        bfloat16 = codec.DTYPES["bfloat16"]
        if any(type(i) is not int or not 0 <= i < len(leaves) or leaves[i].dtype != bfloat16 for i in narrowed):
            raise WireError("a manifest narrows leaves that are not bfloat16")
        origin = PolicyOrigin(codec.text(h, "run", 128), codec.text(h, "normaliser", 64))
        info = codec.field(h, "info", dict)
        return cls(codec.text(h, "key"), version, info, tuple(leaves), frozenset(narrowed), origin)


def _digest(dtype: np.dtype[Any], shape: tuple[int, ...], data: np.ndarray) -> bytes:
    """Of a leaf's meaning and content. It finds equal leaves and broken transfers; keys keep strangers out."""
    digest = xxhash.xxh3_128(f"{codec.dtype_name(dtype)}{shape}".encode())
    digest.update(data.data)
    return digest.digest()


class Published:
    """A snapshot at the server: its manifest and its bytes."""

    def __init__(
        self,
        key: str,
        snapshot: Snapshot,
        info: dict[str, Any],
        previous: Published | None = None,
        *,
        narrow: bool = False,
    ) -> None:
        """Hash every leaf (about 2 ms for 10 MB, without the interpreter's lock).

        A leaf that did not change since `previous` shares its memory. Arrays that are contiguous are not copied and
        must not change afterwards. `narrow` sends float32 as bfloat16, in half the bytes: the actor gets float32 again,
        with 8 bits of mantissa. Raises WireError for a dtype that cannot be sent.
        """
        known: dict[bytes, np.ndarray] = {} if previous is None else previous.by_digest
        self.bytes: list[np.ndarray] = []
        leaves: list[Leaf] = []
        narrowed = set()
        for path, value in snapshot.params.items():
            array = np.asarray(value)
            if narrow and array.dtype == np.float32:
                narrowed.add(len(leaves))
                array = array.astype(codec.DTYPES["bfloat16"])
            data = codec.raw_bytes(array, path)
            name = codec.dtype_name(array.dtype, path)
            leaves.append(Leaf(path, codec.DTYPES[name], array.shape, _digest(codec.DTYPES[name], array.shape, data)))
            self.bytes.append(known.get(leaves[-1].digest, data))
        self.manifest = Manifest(key, snapshot.version, info, tuple(leaves), frozenset(narrowed), snapshot.origin)
        self.by_digest: dict[bytes, np.ndarray] = {
            leaf.digest: data for leaf, data in zip(leaves, self.bytes, strict=True)
        }
        self.announcement: list[Frame] = codec.encode(MANIFEST, self.manifest.header())

    def piece(self, request: Message, max_bytes: int) -> list[Frame]:
        """The answer to a pull request; raises WireError where it asks for bytes that do not exist, or too many."""
        rows = codec.field(request.header, "ranges", list)
        if not 1 <= len(rows) <= MAX_RANGES:
            raise WireError(f"a pull asks for 1..{MAX_RANGES} ranges, got {len(rows)}")
        views: dict[str, np.ndarray] = {}
        total = 0
        for i, row in enumerate(rows):
            if not isinstance(row, list) or len(row) != 3 or any(type(n) is not int or n < 0 for n in row):
                raise WireError("a range is [leaf, offset, length], non-negative integers")
            leaf, offset, length = row
            if leaf >= len(self.bytes) or offset + length > len(self.bytes[leaf]):
                raise WireError(f"range {row} lies outside the snapshot")
            total += length
            views[str(i)] = self.bytes[leaf][offset : offset + length]
        if total > max_bytes:
            raise WireError(f"a pull asks for {total} bytes at once; the limit is {max_bytes}")
        return codec.encode(PIECE, {"key": self.manifest.key, "ranges": rows}, views)


class Pull:
    """A snapshot on its way in: what is missing, what was asked for, what has arrived."""

    def __init__(self, manifest: Manifest, held: Mapping[bytes, np.ndarray], piece_bytes: int) -> None:
        """
        Args:
            held: arrays the client has, by digest; these are not asked for.
            piece_bytes: size of a piece, where `request` is given none.
        """
        self.manifest = manifest
        self.received_bytes = 0
        self._held = held
        # Two leaves with the same content are asked for once.
        wanted: dict[bytes, int] = {}
        for i, leaf in enumerate(manifest.leaves):
            if leaf.digest not in held:
                wanted.setdefault(leaf.digest, i)
        self._buffers = {i: np.empty(manifest.leaves[i].nbytes, np.uint8) for i in wanted.values()}
        self._piece_bytes = piece_bytes
        # In order: what is not asked for.
        self._left = collections.deque(Range(i, 0, len(b)) for i, b in self._buffers.items() if len(b))
        self._asked: set[tuple[Range, ...]] = set()

    @property
    def in_flight(self) -> int:
        """Requests not answered yet."""
        return len(self._asked)

    @property
    def complete(self) -> bool:
        """Whether everything has arrived."""
        return not self._left and not self._asked

    def request(self, piece_bytes: int = 0) -> tuple[Range, ...] | None:
        """The next ranges to ask for, of at most `piece_bytes` together, or None where everything was asked for."""
        room = piece_bytes or self._piece_bytes
        group: list[Range] = []
        while self._left and room and len(group) < MAX_RANGES:
            leaf, offset, nbytes = self._left.popleft()
            length = min(room, nbytes)
            group.append(Range(leaf, offset, length))
            if length < nbytes:
                self._left.appendleft(Range(leaf, offset + length, nbytes - length))
            room -= length
        if not group:
            return None
        self._asked.add(tuple(group))
        return tuple(group)

    def put_back(self, ranges: tuple[Range, ...]) -> None:
        """What was asked for could not be sent: it is asked for again, perhaps in other pieces."""
        self._asked.discard(ranges)
        self._left.extendleft(reversed(ranges))

    def restart(self) -> None:
        """The connection was lost: what was asked for and has not come is asked for again."""
        for ranges in list(self._asked):
            self.put_back(ranges)

    def receive(self, message: Message) -> tuple[Range, ...] | None:
        """Take in a piece and return its ranges; None for a repeated one, which is ignored.

        Raises WireError for one that is not what it says.
        """
        rows = codec.field(message.header, "ranges", list)
        try:
            ranges = tuple(Range(*row) for row in rows)
            asked = ranges in self._asked
        except TypeError as e:
            raise WireError("a piece without its ranges") from e
        if not asked:
            return None
        if len(message.arrays) != len(ranges):
            raise WireError(f"a piece of {len(ranges)} ranges with {len(message.arrays)} arrays")
        for r, data in zip(ranges, message.arrays.values(), strict=True):
            if data.dtype != np.uint8 or data.shape != (r.length,):
                raise WireError(f"a piece of {r.length} bytes arrived as {data.dtype} {data.shape}")
            self._buffers[r.leaf][r.offset : r.offset + r.length] = data
            self.received_bytes += r.length
        self._asked.discard(ranges)
        return ranges

    def result(self) -> tuple[Snapshot, dict[bytes, np.ndarray]]:
        """The snapshot, arrays read-only, and its arrays' bytes by digest for the next pull.

        Raises WireError where what arrived is not what was announced.
        """
        by_digest = {}
        for i, data in self._buffers.items():
            leaf = self.manifest.leaves[i]
            if _digest(leaf.dtype, leaf.shape, data) != leaf.digest:
                raise WireError(f"{leaf.path} of snapshot {self.manifest.version} arrived damaged")
            by_digest[leaf.digest] = data
        params, held = {}, {}
        for i, leaf in enumerate(self.manifest.leaves):
            data = by_digest[leaf.digest] if leaf.digest in by_digest else self._held[leaf.digest]
            held[leaf.digest] = data
            array = data.view(leaf.dtype).reshape(leaf.shape)
            if i in self.manifest.narrowed:
                array = array.astype(np.float32)
            array.flags.writeable = False
            params[leaf.path] = array
        return Snapshot(self.manifest.version, params, origin=self.manifest.origin), held

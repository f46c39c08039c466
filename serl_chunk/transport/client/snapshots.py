"""The actor's side of snapshots: the announced one, the one being pulled, and the newest complete one."""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import zmq

from serl_chunk.config.transport import TransportConfig
from serl_chunk.transport.client.flow import Flow, Sent
from serl_chunk.transport.wire import handshake, snapshots
from serl_chunk.transport.wire.snapshots import Manifest, Range
from serl_chunk.types import PolicyOrigin, SerlChunkError, Snapshot
from serl_chunk_robot.wire import codec
from serl_chunk_robot.wire.codec import Message, WireError
from serl_chunk_robot.wire.sockets import try_send

logger = logging.getLogger(__name__)

_PIECE_BYTES = 1 << 20  # of a snapshot at most; less on a slow link
_WINDOW = 4  # largest pieces in flight: enough to hide the round trip, few enough to leave the line to others


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
        while self._left and nbytes and len(group) < snapshots.MAX_RANGES:
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
        ranges = snapshots.decode_ranges(message.header)
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
        check = snapshots.new_digest(leaf.dtype, leaf.shape)
        check.update(data.data)
        if check.digest() == digest:
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


class FetchError(SerlChunkError):
    """The learner could not send a checkpoint; the message is the learner's reason."""


@dataclasses.dataclass(eq=False)
class FetchRequest:
    """A checkpoint that a caller waits for."""

    number: int
    step: str
    sent: bool = False
    manifest: Manifest | None = None
    result: tuple[Snapshot, dict[str, Any]] | SerlChunkError | None = None
    done: threading.Event = dataclasses.field(default_factory=threading.Event)

    def finish(self, result: tuple[Snapshot, dict[str, Any]] | SerlChunkError) -> None:
        self.result = result
        self.done.set()


class SnapshotClient:
    """Keeps the newest snapshot complete, and fetches a checkpoint that a caller waits for.

    Used by the network thread; any thread may read `held`, and request and forget a checkpoint.
    """

    def __init__(self, config: TransportConfig) -> None:
        largest = min(_PIECE_BYTES, config.max_message_bytes)
        self.held: Snapshot | None = None
        self.version = -1  # newest complete snapshot of `origin`
        self.origin = PolicyOrigin()  # of the learner that the connection is to, and so of `held`
        self.received_bytes = 0
        self.pulled = 0  # snapshots completed
        self.flow = Flow(most=_WINDOW * largest, largest=largest, timeout_s=config.timeout_s)
        self.progress_at = 0.0  # when the last answer came, or none was awaited
        self._timeout_s = config.timeout_s
        self._leaves: Mapping[bytes, np.ndarray] = {}  # of the newest complete snapshot, by digest
        self._announced: Manifest | None = None
        self._pull: Pull | None = None
        # given up, as the learner lacks leaves of it: the next one takes over from it
        self._earlier: Pull | None = None
        self._fetch: FetchRequest | None = None  # the request that `_pull` is about
        self._fetches: deque[FetchRequest] = deque()  # whose manifests have arrived: pulled before anything else
        self._wanted: FetchRequest | None = None  # the checkpoint that a caller waits for
        self._fetch_count = 0
        self._requests: dict[tuple[Range, ...], Sent] = {}  # not answered
        self._subscribed = False
        self._subscribed_at = 0.0
        self._announcement_s = config.timeout_s  # how long an announcement may take

    def latest(self) -> Snapshot | None:
        """Return the newest complete snapshot of the learner of the newest welcome; its arrays are read-only."""
        return self.held

    def request_checkpoint(self, step: str) -> FetchRequest:
        """Raises FetchError while there is another request, until `forget_checkpoint`."""
        if self._wanted is not None:
            raise FetchError("another checkpoint is being fetched on this connection")
        self._fetch_count += 1
        self._wanted = FetchRequest(self._fetch_count, step)
        return self._wanted

    def forget_checkpoint(self) -> None:
        self._wanted = None

    def send_request(self, send: Callable[..., bool], token: bytes) -> None:
        """Request the checkpoint that is waited for where that was not done on this connection."""
        request = self._wanted
        if request is not None and not request.sent and request.manifest is None:
            request.sent = send(handshake.FETCH, token=token, request=request.number, step=request.step)

    def receive_checkpoint(self, message: Message) -> None:
        """Handle the learner's answer to that. Raises WireError."""
        request = self._wanted
        if request is None or message.header.get("request") != request.number:
            return  # its caller gave up
        if message.kind == handshake.FETCH_FAILED:
            request.finish(FetchError(codec.shown(codec.text(message.header, "reason", 1 << 16))))
        else:
            request.manifest = Manifest.decode(message)
            self._fetches.append(request)

    def disconnected(self) -> None:
        if (request := self._wanted) is not None:
            request.sent = False

    def connected(self, origin: PolicyOrigin) -> None:
        """Subscribe anew, and request again what did not arrive. Leaves are kept, by their digests.

        Snapshots of another origin (run or normaliser) are dropped: parameters never act with another normaliser.
        """
        self._subscribed = False
        self._announced = None
        self.flow.restart()
        self._requests.clear()
        for pull in filter(None, (self._pull, self._earlier)):
            pull.restart()
        if origin != self.origin:
            self.origin, self.held, self.version = origin, None, -1
            waiting = [*self._fetches] if self._fetch is None else [self._fetch, *self._fetches]
            self._fetches.clear()
            self._give_up()
            for request in waiting:
                request.finish(FetchError("the learner was replaced while it sent the checkpoint. Fetch it again"))

    def _give_up(self) -> None:
        self._earlier, self._pull, self._fetch = self._pull or self._earlier, None, None

    def set_available_version(self, version: int) -> None:
        """Note the learner's version. A lost announcement is requested again, at growing intervals."""
        busy = self._announced is not None or self._pull is not None or not self._subscribed
        if version > self.version and not busy and time.monotonic() - self._subscribed_at > self._announcement_s:
            self._subscribed = False
            self._announcement_s *= 2

    def receive(self, message: Message) -> bool:
        """Handle a message; True where a fetch ended. Raises WireError."""
        if message.kind == snapshots.MANIFEST:
            manifest = Manifest.decode(message)
            if manifest.origin != self.origin:
                raise codec.WireError(
                    f"snapshot {manifest.version} is of {manifest.origin}, the welcome was of {self.origin}"
                )
            self._announcement_s = self._timeout_s
            if manifest.version > self.version:
                self._announced = manifest
            return False
        if message.kind not in (snapshots.PIECE, snapshots.GONE):
            raise codec.WireError(f"unknown kind {message.kind!r}")
        ranges = snapshots.decode_ranges(message.header)
        sent, pull = self._requests.pop(ranges, None), self._pull or self._earlier
        if sent is None or pull is None:
            return False  # it was answered before
        self.progress_at = time.monotonic()
        if message.kind == snapshots.PIECE:
            self.flow.arrive(sent)
            pull.receive(message)
            self.received_bytes += sum(r.length for r in ranges)
            return False
        self.flow.cancel(sent)
        if not pull.put_back(ranges) or self._pull is None:
            return False
        fetch = self._fetch
        self._give_up()
        if fetch is None:
            self._subscribed = False
            return False
        fetch.finish(FetchError("the learner was restarted while it sent the checkpoint. Fetch it again"))
        return True

    def pump(self, socket: zmq.Socket[bytes], token: bytes) -> bool:
        """Send the requests that are due; True where a snapshot became complete or a fetch ended."""
        changed = False
        while (pull := self._current()) is not None:
            self._request(pull, socket, token)
            if not pull.complete:
                break
            self._complete(pull, socket, token)
            changed = True
        # The learner keeps what a session pulls until it subscribes again: not before it has arrived.
        if not self._subscribed and (pull is None or self._fetch is not None):
            frames = codec.encode(snapshots.SUBSCRIBE, {"token": token, "version": self.version})
            self._subscribed = try_send(socket, frames)
            self._subscribed_at = time.monotonic()
        return changed

    def _current(self) -> Pull | None:
        if self._pull is not None:
            return self._pull
        if self._fetches:
            self._fetch = self._fetches.popleft()
            manifest = self._fetch.manifest
        else:
            manifest, self._announced = self._announced, None
        if manifest is None:
            return None
        self._pull, self._earlier = Pull(manifest, self._leaves, self._earlier), None
        return self._pull

    def _request(self, pull: Pull, socket: zmq.Socket[bytes], token: bytes) -> None:
        if not self._requests:
            self.progress_at = time.monotonic()
        while self.flow.has_room(self.flow.message_bytes):
            ranges = pull.request(self.flow.message_bytes)
            if ranges is None:
                return
            if not try_send(socket, codec.encode(snapshots.PULL, {"token": token, "ranges": ranges})):
                pull.put_back(ranges)
                return
            if (before := self._requests.get(ranges)) is not None:
                self.flow.cancel(before)  # of an earlier manifest: the first answer serves both
            self._requests[ranges] = self.flow.send(sum(r.length for r in ranges))

    def _complete(self, pull: Pull, socket: zmq.Socket[bytes], token: bytes) -> None:
        fetch, self._fetch, self._pull = self._fetch, None, None
        snapshot = pull.result()
        if fetch is not None:
            try_send(socket, codec.encode(snapshots.RELEASE, {"token": token}))
            fetch.finish((snapshot, pull.manifest.info))
            return
        self.held = snapshot._replace(arrived=time.monotonic())
        self.version = snapshot.version
        if self._announced is not None and self._announced.version <= self.version:
            self._announced = None  # a second subscription had the same snapshot announced while it was pulled
        self._leaves = pull.arrived
        self.pulled += 1
        self._subscribed = False  # to get the newest since

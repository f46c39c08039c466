"""The actor's side of snapshots: the announced one, the one being pulled, and the newest complete one."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import zmq

from serl_chunk.transport.client.flow import Flow, Sent
from serl_chunk.transport.wire import handshake, snapshots
from serl_chunk.transport.wire.snapshots import Manifest, Pull, Range
from serl_chunk.types import PolicyOrigin, SerlChunkError, Snapshot
from serl_chunk_robot.wire import codec
from serl_chunk_robot.wire.codec import Message
from serl_chunk_robot.wire.sockets import try_send

_WINDOW = 4  # largest pieces in flight: enough to hide the round trip, few enough to leave the line to others


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


class CheckpointFetches:
    """The checkpoint that a caller waits for: requested by its thread, carried by the network thread."""

    def __init__(self, snapshots: SnapshotClient) -> None:
        self._snapshots = snapshots
        self._request: FetchRequest | None = None
        self._count = 0

    def request(self, step: str) -> FetchRequest:
        """Raises FetchError while there is another request, until `forget`."""
        if self._request is not None:
            raise FetchError("another checkpoint is being fetched on this connection")
        self._count += 1
        self._request = FetchRequest(self._count, step)
        return self._request

    def forget(self) -> None:
        self._request = None

    def send(self, send: Callable[..., bool], token: bytes) -> None:
        request = self._request
        if request is not None and not request.sent and request.manifest is None:
            request.sent = send(handshake.FETCH, token=token, request=request.number, step=request.step)

    def receive(self, message: Message) -> None:
        """Handle the learner's answer. Raises WireError."""
        request = self._request
        if request is None or message.header.get("request") != request.number:
            return  # its caller gave up
        if message.kind == handshake.FETCH_FAILED:
            request.finish(FetchError(codec.shown(codec.text(message.header, "reason", 1 << 16))))
        else:
            request.manifest = Manifest.decode(message)
            self._snapshots.fetches.append(request)

    def disconnected(self) -> None:
        if (request := self._request) is not None:
            request.sent = False


class SnapshotClient:
    """Keeps the newest snapshot complete. Used by the network thread; any thread may read `held`."""

    def __init__(self, piece_bytes: int, timeout_s: float) -> None:
        self.held: Snapshot | None = None
        self.version = -1  # newest complete snapshot of `origin`
        self.origin = PolicyOrigin()  # of the learner that the connection is to, and so of `held`
        self.received_bytes = 0
        self.pulled = 0  # snapshots completed
        self.flow = Flow(most=_WINDOW * piece_bytes, largest=piece_bytes, timeout_s=timeout_s)
        self.progress_at = 0.0  # when the last answer came, or none was awaited
        self._timeout_s = timeout_s
        self._leaves: Mapping[bytes, np.ndarray] = {}  # of the newest complete snapshot, by digest
        self._announced: Manifest | None = None
        self._pull: Pull | None = None
        self._given_up = False  # the learner lacks leaves of `_pull`, which the next pull takes over from
        self._fetch: FetchRequest | None = None  # the request that `_pull` is about
        self.fetches: deque[FetchRequest] = deque()  # whose manifests have arrived: pulled before anything else
        self._requests: dict[tuple[Range, ...], Sent] = {}  # not answered
        self._subscribed = False
        self._subscribed_at = 0.0
        self._announcement_s = timeout_s  # how long an announcement may take

    def connected(self, origin: PolicyOrigin) -> None:
        """Subscribe anew, and request again what did not arrive. Leaves are kept, by their digests.

        Snapshots of another origin (run or normaliser) are dropped: parameters never act with another normaliser.
        """
        self._subscribed = False
        self._announced = None
        self.flow.restart()
        self._requests.clear()
        if self._pull is not None:
            self._pull.restart()
        if origin != self.origin:
            self.origin, self.held, self.version = origin, None, -1
            waiting = [*self.fetches] if self._fetch is None else [self._fetch, *self.fetches]
            self.fetches.clear()
            self._give_up()
            for request in waiting:
                request.finish(FetchError("the learner was replaced while it sent the checkpoint. Fetch it again"))

    def _give_up(self) -> None:
        self._given_up, self._fetch = self._pull is not None, None

    def set_available_version(self, version: int) -> None:
        """Note the learner's version. A lost announcement is requested again, at growing intervals."""
        pulling = self._pull is not None and not self._given_up
        if version <= self.version or self._announced is not None or pulling or not self._subscribed:
            return
        if time.monotonic() - self._subscribed_at > self._announcement_s:
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
        sent = self._requests.pop(ranges, None)
        if sent is None or self._pull is None:
            return False  # it was answered before
        self.progress_at = time.monotonic()
        if message.kind == snapshots.PIECE:
            self.flow.arrive(sent)
            self._pull.receive(message)
            self.received_bytes += sum(r.length for r in ranges)
            return False
        self.flow.cancel(sent)
        if not self._pull.put_back(ranges) or self._given_up:
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
        if self._pull is not None and not self._given_up:
            return self._pull
        if self.fetches:
            self._fetch = self.fetches.popleft()
            manifest = self._fetch.manifest
        else:
            manifest, self._announced = self._announced, None
        if manifest is None:
            return None
        self._pull, self._given_up = Pull(manifest, self._leaves, self._pull), False
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

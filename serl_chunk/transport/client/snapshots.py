"""The actor's side of snapshots: what was announced, what is being pulled, what is held."""

from __future__ import annotations

import collections
import logging
import threading
import time
from typing import Any, NamedTuple

import numpy as np
import zmq

from serl_chunk.transport.client.flow import Flow, Sent
from serl_chunk.transport.sockets import try_send
from serl_chunk.transport.wire import codec, snapshots
from serl_chunk.transport.wire.codec import Message
from serl_chunk.transport.wire.snapshots import Manifest, Pull, Range
from serl_chunk.types import PolicyOrigin, SerlChunkError, Snapshot

_WINDOW = 4  # largest pieces in flight: enough to hide the round trip, few enough to leave the line to others


log = logging.getLogger(__name__)


class FetchError(SerlChunkError):
    """The learner could not give a checkpoint; the message is its sentence."""


class FetchRequest:
    """A checkpoint that a caller waits for."""

    def __init__(self, number: int, step: str) -> None:
        self.number = number
        self.step = step
        self.sent = False
        self.manifest: Manifest | None = None
        self.result: tuple[Snapshot, dict[str, Any]] | None = None
        self.error: SerlChunkError | None = None
        self.done = threading.Event()

    def finish(self, result: tuple[Snapshot, dict[str, Any]] | None, error: SerlChunkError | None = None) -> None:
        """Wake who waits."""
        self.result, self.error = result, error
        self.done.set()


class CompleteSnapshot(NamedTuple):
    """A complete snapshot."""

    snapshot: Snapshot
    info: dict[str, Any]


class SnapshotClient:
    """Keeps the newest snapshot complete. Used by the network thread; any thread may read `held`."""

    def __init__(self, piece_bytes: int, timeout_s: float) -> None:
        self.held: CompleteSnapshot | None = None
        self.version = -1  # newest complete snapshot of `origin`
        self.origin = PolicyOrigin()  # of the learner that the connection is to, and so of `held`
        self.received_bytes = 0
        self.pulled = 0  # snapshots completed
        self.flow = Flow(most=_WINDOW * piece_bytes, largest=piece_bytes, timeout_s=timeout_s)
        self.progress_at = 0.0  # when the last piece came, or none was awaited
        self._piece_bytes = piece_bytes
        self._timeout_s = timeout_s
        self._by_digest: dict[bytes, np.ndarray] = {}
        self._announced: Manifest | None = None
        self._pull: Pull | None = None
        self._fetch: FetchRequest | None = None  # the request that `_pull` is about
        self._fetches: collections.deque[FetchRequest] = collections.deque()
        self._requests: dict[tuple[Range, ...], Sent] = {}  # not answered
        self._subscribed = False
        self._subscribed_at = 0.0
        self._announcement_s = timeout_s  # how long an announcement may take

    def connected(self, origin: PolicyOrigin) -> None:
        """A connection began: say what is held, and ask again for what did not come.

        Of another origin (run or normaliser) nothing is kept: no parameters of one may act with the normaliser of
        another.
        """
        self._subscribed = False
        self._announced = None
        self.flow.restart()
        self._requests.clear()
        if origin != self.origin:
            self._forget()
            self.origin = origin
        if self._pull is not None:
            self._pull.restart()

    def _forget(self) -> None:
        self.held, self.version = None, -1
        waiting = [*self._fetches] if self._fetch is None else [self._fetch, *self._fetches]
        self._fetch, self._pull = None, None
        self._fetches.clear()
        for request in waiting:
            request.finish(None, FetchError("the learner was replaced while it sent the checkpoint: ask again"))

    def set_available_version(self, version: int) -> None:
        """The learner has this version. An announcement that was lost is asked for again, each time less soon."""
        if version <= self.version or self._announced is not None or self._pull is not None or not self._subscribed:
            return
        if time.monotonic() - self._subscribed_at > self._announcement_s:
            self._subscribed = False
            self._announcement_s *= 2

    def add_fetch(self, request: FetchRequest) -> None:
        """Pull a checkpoint whose manifest has come, before anything else."""
        self._fetches.append(request)

    def receive(self, message: Message) -> bool:
        """Take in a message; True where a snapshot became complete or a fetch ended. Raises WireError."""
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
        if self._pull is None or message.header.get("key") != self._pull.manifest.key:
            return False  # of a pull that was given up
        if message.kind == snapshots.GONE:
            return self._give_up()
        if message.kind == snapshots.PIECE:
            before = self._pull.received_bytes
            ranges = self._pull.receive(message)
            self.received_bytes += self._pull.received_bytes - before
            if ranges is not None:
                self.flow.arrive(self._requests.pop(ranges))
                self.progress_at = time.monotonic()
            return False
        raise codec.WireError(f"unknown kind {message.kind!r}")

    def _give_up(self) -> bool:
        """The learner no longer has what is being pulled: it was restarted."""
        fetch, self._fetch, self._pull = self._fetch, None, None
        self.flow.restart()
        self._requests.clear()
        if fetch is None:
            self._subscribed = False
            return False
        fetch.finish(None, FetchError("the learner was restarted while it sent the checkpoint: ask again"))
        return True

    def pump(self, socket: zmq.Socket[bytes], token: bytes) -> bool:
        """Send the requests that are due; True where a snapshot became complete or a fetch ended."""
        changed = False
        while True:
            if self._pull is None:
                self._start()
            if self._pull is None:
                break
            self._request(socket, token)
            if not self._pull.complete:
                break
            self._complete(socket, token)
            changed = True
        # The learner keeps what a session pulls until it subscribes again: not before it is here.
        if not self._subscribed and (self._pull is None or self._fetch is not None):
            frames = codec.encode(snapshots.SUBSCRIBE, {"token": token, "version": self.version})
            self._subscribed = try_send(socket, frames)
            self._subscribed_at = time.monotonic()
        return changed

    def _start(self) -> None:
        manifest = None
        if self._fetches:
            self._fetch = self._fetches.popleft()
            manifest = self._fetch.manifest
        elif self._announced is not None:
            manifest, self._announced = self._announced, None
        if manifest is not None:
            self._pull = Pull(manifest, self._by_digest, self._piece_bytes)

    def _request(self, socket: zmq.Socket[bytes], token: bytes) -> None:
        assert self._pull is not None
        if not self._requests:
            self.progress_at = time.monotonic()
        while self.flow.has_room(self.flow.message_bytes):
            ranges = self._pull.request(self.flow.message_bytes)
            if ranges is None:
                return
            fields = {"token": token, "key": self._pull.manifest.key, "ranges": [list(r) for r in ranges]}
            if not try_send(socket, codec.encode(snapshots.PULL, fields)):
                self._pull.put_back(ranges)
                return
            self._requests[ranges] = self.flow.send(sum(r.length for r in ranges))

    def _complete(self, socket: zmq.Socket[bytes], token: bytes) -> None:
        assert self._pull is not None
        pull, self._pull = self._pull, None
        fetch, self._fetch = self._fetch, None
        try:
            snapshot, by_digest = pull.result()
        except codec.WireError as e:
            log.error("%s: asking for it again", e)
            self._subscribed = False
            if fetch is not None:
                fetch.finish(None, FetchError(f"{e}: ask again"))
            return
        if fetch is not None:
            try_send(socket, codec.encode(snapshots.RELEASE, {"token": token}))
            fetch.finish((snapshot, pull.manifest.info))
            return
        self.held = CompleteSnapshot(snapshot._replace(arrived=time.monotonic()), pull.manifest.info)
        self.version = snapshot.version
        if self._announced is not None and self._announced.version <= self.version:
            self._announced = None  # a second subscription had the same snapshot announced while it was pulled
        self._by_digest = by_digest
        self.pulled += 1
        self._subscribed = False  # which asks for the newest since

"""Publishes snapshots at the learner: announcements, pieces, and checkpoints on request."""

from __future__ import annotations

import collections
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from serl_chunk.transport.server.handler import ServerHandler
from serl_chunk.transport.server.sessions import Session, Sessions
from serl_chunk.transport.server.sockets import ServerSockets
from serl_chunk.transport.wire import handshake, snapshots
from serl_chunk.transport.wire.snapshots import Published
from serl_chunk.types import ConfigError, SerlChunkError, Snapshot
from serl_chunk_robot.wire import codec
from serl_chunk_robot.wire.codec import Message, WireError

logger = logging.getLogger(__name__)

_MAX_OLDER = 4  # older versions that are kept for sessions in the middle of a pull


class SnapshotChannel:
    """Announces the newest snapshot of a run and answers pulls by digest.

    Older snapshots and checkpoints are kept while they are being pulled. `publish` is called by one thread, the other
    methods by the control thread.
    """

    def __init__(self, sockets: ServerSockets, sessions: Sessions, run: str, handler: ServerHandler) -> None:
        self.newest: Published | None = None
        self.run, self._sockets, self._sessions, self._handler = run, sockets, sessions, handler
        self._counters = sockets.counters["snapshots"]
        self._narrow = sockets.config.snapshot_dtype == "bfloat16"  # of snapshots; checkpoints travel as they are
        self._pulled: dict[str, Published] = {}  # session -> the version it was announced and has not completed
        self._checkpoints: dict[str, Published] = {}  # session -> the checkpoint it was given and has not completed
        self._reader = ThreadPoolExecutor(1, "serl-chunk-fetch")  # a slow disk delays no snapshot
        self._read: collections.deque[tuple[str, int, Published | str]] = collections.deque()  # session, request

    @property
    def version(self) -> int:
        return self.newest.manifest.version if self.newest else -1

    @property
    def nbytes(self) -> int:
        return self.newest.manifest.nbytes if self.newest else 0

    def publish(self, snapshot: Snapshot, info: dict[str, Any]) -> None:
        if snapshot.version <= self.version:
            raise ConfigError(f"snapshot version {snapshot.version} does not follow {self.version}: they only go up")
        self.newest = Published(self._of_run(snapshot), info, self.newest, narrow=self._narrow)
        self._sockets.wakers["control"].wake()

    def _of_run(self, snapshot: Snapshot) -> Snapshot:
        return snapshot._replace(origin=snapshot.origin._replace(run=self.run))

    def receive(self, session: Session, message: Message) -> None:
        if message.kind == snapshots.SUBSCRIBE:
            session.connection.holds = codec.field(message.header, "version", int)
            self._pulled.pop(session.info.session, None)
            self._announce(session)
        elif message.kind == snapshots.PULL:
            newest = [] if self.newest is None else [self.newest]
            kept = [*newest, *self._pulled.values(), *self._checkpoints.values()]
            frames = snapshots.answer_pull(message, kept, self._sockets.config.max_message_bytes)
            self._counters["pieces"] += 1
            self._counters["snapshot_bytes"] += codec.size_of(frames)
            self._sockets.send("snapshots", session.connection.snapshots_id, frames)
        elif message.kind == snapshots.RELEASE:
            self._checkpoints.pop(session.info.session, None)
        else:
            raise WireError(f"unknown kind {message.kind!r}")

    def _announce(self, session: Session) -> None:
        newest, connection = self.newest, session.connection
        if newest is None or connection.holds is None or newest.manifest.version <= connection.holds:
            return
        if self._sockets.send("snapshots", connection.snapshots_id, newest.announcement):
            connection.holds = None
            self._pulled[session.info.session] = newest

    def fetch(self, session: Session, message: Message) -> None:
        request, step = codec.count(message.header, "request"), codec.text(message.header, "step", 64)
        if session.fetch_request is None:
            session.fetch_request = request
            self._reader.submit(self._load, session.info.session, request, step)
        elif session.fetch_request != request:
            self._refuse(session, request, "another checkpoint is being fetched for this actor")

    def _load(self, session: str, request: int, step: str) -> None:
        result: Published | str
        try:
            snapshot, info = self._handler.fetch(step)
            result = Published(self._of_run(snapshot), info, self.newest)
        except SerlChunkError as e:
            result = str(e)
        except Exception as e:  # no request of an actor ends the learner
            logger.exception("checkpoint %r", step)
            result = f"the learner cannot read checkpoint {step!r} ({type(e).__name__}): its own output says why"
        self._read.append((session, request, result))
        self._sockets.wakers["control"].wake()

    def _refuse(self, session: Session, request: int, reason: str) -> None:
        fields = {"request": request, "reason": reason}
        self._sockets.send("control", session.connection.control_id, codec.encode(handshake.FETCH_FAILED, fields))

    def tick(self) -> None:
        live = {s.info.session: s for s in self._sessions if s.live}
        while self._read:
            name, request, result = self._read.popleft()
            session = live.get(name)
            if session is None or session.fetch_request != request:
                continue  # it gave up
            session.fetch_request = None
            if isinstance(result, str):
                self._refuse(session, request, result)
                continue
            self._checkpoints[name] = result
            fields = {"request": request, **result.manifest.header()}
            self._sockets.send("control", session.connection.control_id, codec.encode(handshake.FETCHED, fields))
        for session in live.values():
            self._announce(session)
        for kept in (self._pulled, self._checkpoints):
            for name in kept.keys() - live.keys():
                del kept[name]
        versions = {p.manifest.version for p in self._pulled.values()} - {self.version}
        for version in sorted(versions)[_MAX_OLDER:]:  # the oldest are nearest to their end
            self._pulled = {name: p for name, p in self._pulled.items() if p.manifest.version != version}

    def close(self) -> None:
        self._reader.shutdown(cancel_futures=True)

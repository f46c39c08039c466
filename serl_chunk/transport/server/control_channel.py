"""Publishes snapshots at the learner: announcements, pieces, and checkpoints on request."""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from serl_chunk.transport.security.server import Authenticator, user_of
from serl_chunk.transport.server.record_channel import RecordReceiver
from serl_chunk.transport.server.sessions import RefuseError, ServerHandler, Session, Sessions
from serl_chunk.transport.server.sockets import RateLimiter, ServerSockets, address_of
from serl_chunk.transport.storage import journal
from serl_chunk.transport.wire import handshake, snapshots
from serl_chunk.transport.wire.tickets import TicketRequest, encode_grant
from serl_chunk.types import ConfigError, SerlChunkError, Snapshot
from serl_chunk_robot.wire import codec
from serl_chunk_robot.wire.codec import Frame, Message, WireError

logger = logging.getLogger(__name__)

_MAX_OLDER = 4  # older versions that are kept for sessions in the middle of a pull
_DATED = 1000  # versions whose age is known
_KEYS_S = 0.5  # between looks for revoked keys


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
        leaves: list[snapshots.Leaf] = []
        narrowed = set()
        for path, value in snapshot.params.items():
            array = np.asarray(value)
            if narrow and array.dtype == np.float32:
                narrowed.add(len(leaves))
                array = array.astype(codec.DTYPES["bfloat16"])
            dtype = codec.DTYPES[codec.dtype_name(array.dtype, path)]
            data = codec.raw_bytes(array)
            check = snapshots.new_digest(dtype, array.shape)
            check.update(data.data)
            digest = check.digest()
            self.leaves[digest] = known.get(digest, data)
            leaves.append(snapshots.Leaf(path, dtype, array.shape, digest))
        self.manifest = snapshots.Manifest(snapshot.version, info, tuple(leaves), frozenset(narrowed), snapshot.origin)
        self.announcement: list[Frame] = codec.encode(snapshots.MANIFEST, self.manifest.header())


def answer_pull(request: Message, published: Iterable[Published], max_bytes: int) -> list[Frame]:
    """Return the piece that a pull requests, or a `gone` where a leaf is in none of `published`. Raises WireError."""
    rows, stores = request.header.get("ranges"), list(published)
    views: dict[str, np.ndarray] = {}
    total = 0
    for i, (digest, offset, length) in enumerate(snapshots.decode_ranges(request.header)):
        data = next((p.leaves[digest] for p in stores if digest in p.leaves), None)
        if data is None:
            return codec.encode(snapshots.GONE, {"ranges": rows})
        if offset + length > len(data):
            raise WireError(f"bytes {offset} to {offset + length} lie outside a leaf of {len(data)} bytes")
        total += length
        views[str(i)] = data[offset : offset + length]
    if total > max_bytes:
        raise WireError(f"a pull requests {total} bytes at once; the limit is {max_bytes}")
    return codec.encode(snapshots.PIECE, {"ranges": rows}, views)


class SnapshotChannel:
    """Announces the newest snapshot of a run and answers pulls by digest.

    Older snapshots and checkpoints are kept while they are being pulled. `publish` is called by one thread, the other
    methods by the control thread.
    """

    def __init__(
        self, sockets: ServerSockets, sessions: Sessions, run: str, handler: ServerHandler, check: Callable[[], None]
    ) -> None:
        self.newest: Published | None = None
        self._published_at: dict[int, float] = {}  # version -> monotonic s
        self.run, self._sockets, self._sessions, self._handler, self._check = run, sockets, sessions, handler, check
        self._counters = sockets.counters["control"]
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
        """Offer newer parameters, with plain values about them. For one thread, which hashes them (2 ms for 10 MB).

        The arrays must not change afterwards. Raises ConfigError where the version does not go up, WireError for a
        dtype that cannot be sent, and what `LearnerServer.check` raises.
        """
        self._check()
        if snapshot.version <= self.version:
            raise ConfigError(f"snapshot version {snapshot.version} does not follow {self.version}: they only go up")
        self.newest = Published(self._of_run(snapshot), info, self.newest, narrow=self._narrow)
        newest = dict(list(self._published_at.items())[-_DATED:])  # replaced whole: any thread reads it
        self._published_at = newest | {snapshot.version: time.monotonic()}
        self._sockets.wakers["control"].wake()

    def _of_run(self, snapshot: Snapshot) -> Snapshot:
        return snapshot._replace(origin=snapshot.origin._replace(run=self.run))

    def age_of(self, version: int) -> float:
        """Return seconds since a version was published by this process; -1 where that is not known. Any thread."""
        at = self._published_at.get(version)
        return -1.0 if at is None else time.monotonic() - at

    def receive(self, session: Session, message: Message) -> None:
        """Handle one of `snapshots.REQUESTS`. Raises WireError."""
        if message.kind == snapshots.SUBSCRIBE:
            session.connection.holds = session.connection.version = codec.field(message.header, "version", int)
            self._pulled.pop(session.info.session, None)
            self._announce(session)
        elif message.kind == snapshots.PULL:
            newest = [] if self.newest is None else [self.newest]
            kept = [*newest, *self._pulled.values(), *self._checkpoints.values()]
            frames = answer_pull(message, kept, self._sockets.config.max_message_bytes)
            self._counters["pieces"] += 1
            self._counters["snapshot_bytes"] += codec.size_of(frames)
            self._sockets.send("control", session.connection.snapshots_id, frames)
        else:
            self._checkpoints.pop(session.info.session, None)

    def _announce(self, session: Session) -> None:
        newest, connection = self.newest, session.connection
        if newest is None or connection.holds is None or newest.manifest.version <= connection.holds:
            return
        if self._sockets.send("control", connection.snapshots_id, newest.announcement):
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


class ControlChannel:
    """Admits actors, answers their heartbeats, notices their silence, announces snapshots.

    Used by the control thread, except where a method names another one.
    """

    def __init__(
        self, receiver: RecordReceiver, snapshots: SnapshotChannel, handler: ServerHandler, *, episode_timeout: float
    ) -> None:
        self.finished: str | None = None  # why training is over; the learner's thread sets it
        self._receiver, self._snapshots = receiver, snapshots
        self._sockets, self._sessions = receiver.sockets, receiver.sessions
        self._config, self._limits = self._sockets.config, self._sockets.limits
        self._counters = self._sockets.counters["control"]
        self._run_id, self._handler, self._episode_timeout = snapshots.run, handler, episode_timeout
        # Of all peers together: one alone could connect again.
        self._probes = RateLimiter(handshake.AT_ONCE, handshake.PER_S)
        self._keys_at = 0.0  # when revoked keys are looked for next
        self._sessions_at = 0.0  # when all sessions are looked at next: a quarter of the time at most

    def receive(self, identity: bytes, frames: list[Frame]) -> None:
        message = codec.decode(frames, self._limits)
        authenticator = self._sockets.authenticator
        key = user_of(frames) if authenticator is not None else ""
        answer = authenticator.answer(message, key, address_of(frames)) if authenticator is not None else None
        if answer is not None:
            self._sockets.send("control", identity, answer)
        elif message.kind == handshake.WHO:
            sentence = handshake.compare_protocol(codec.count(message.header, "protocol"))
            known = codec.encode(handshake.IDENTITY, {"run": self._run_id})
            self._sockets.send("control", identity, handshake.refusal(sentence) if sentence else known)
        elif message.kind == handshake.HELLO:
            self._on_hello(identity, handshake.Hello.decode(message), address_of(frames), key)
        elif message.kind in (handshake.INSPECT, handshake.ECHO, handshake.ACTORS):
            dropped = self._probes.is_reached("")  # its sender notices
            self._counters["probes_dropped" if dropped else "probes"] += 1
            if not dropped:
                self._probes.add("")
                self._sockets.send("control", identity, self._probe(message, key))
        elif (session := self._session(message, identity)) is None:
            pass
        elif message.kind in snapshots.REQUESTS:
            session.connection.snapshots_id = identity
            self._snapshots.receive(session, message)
        else:
            session.connection.control_id = identity
            self._receive_of(session, message)

    def _receive_of(self, session: Session, message: Message) -> None:
        if message.kind == handshake.PING:
            header = {"timeout_s": 0.0, "unacknowledged": 0} | message.header  # a data socket's has none
            session.connection.timeout_s = codec.field(header, "timeout_s", float)
            session.connection.unacknowledged = codec.count(header, "unacknowledged")
            self._status(session)
        elif message.kind == handshake.BYE:
            self._sessions.fence(session)
            self._sessions.leave(session)
            retired_at = codec.field({"retired_at": None} | message.header, "retired_at", (int, type(None)))
            self._receiver.end_later(session, gone=False, retire=retired_at == session.state.expected)
        elif message.kind == handshake.TICKETS:
            session.connection.tickets = TicketRequest.decode(message)
            self._grant(session, answer=True)
        elif message.kind == handshake.FETCH:
            self._snapshots.fetch(session, message)
        else:
            raise WireError(f"unknown kind {message.kind!r}")

    def _probe(self, message: Message, key: str) -> list[Frame]:
        if message.kind == handshake.ACTORS:
            return codec.encode(handshake.ACTOR_STATES, {"actors": [list(state) for state in self.actor_states()]})
        return self._inspect(message, key) if message.kind == handshake.INSPECT else handshake.answer_echo(message)

    def actor_states(self) -> list[handshake.ActorState]:
        """Return the actors that have or had a session, by name; any thread."""
        now, found = time.monotonic(), collections.defaultdict[str, list[Session]](list)
        for session in self._sessions:
            if not session.info.demonstrations:
                found[session.info.actor_id].append(session)
        states = []
        for name, sessions in sorted(found.items()):
            newest = max(sessions, key=lambda s: (s.live, s.connection.heard_at))
            connection, steps = newest.connection, sum(s.state.steps for s in sessions)
            silent, processes = now - connection.heard_at, sum(s.info.incarnation for s in sessions)
            age = self._snapshots.age_of(connection.version)
            states.append(
                handshake.ActorState(name, newest.live, steps, silent, processes - 1, age, connection.unacknowledged)
            )
        return states

    def _inspect(self, message: Message, key: str) -> list[Frame]:
        request = handshake.StatusRequest.decode(message)
        live = [s for s in self._sessions if s.live]
        authenticator, store, not_ready = self._sockets.authenticator, self._receiver.store, ""
        try:
            self._handler.welcome()
        except SerlChunkError as e:
            not_ready = str(e)
        return handshake.LearnerStatus(
            run=self._run_id,
            differs=handshake.compare(self._sessions.contract, request.contract) if request.contract else "",
            taken_by=next((s.info.peer for s in live if s.info.actor_id == request.actor_id), ""),
            not_ready=not_ready,
            stalled=self._receiver.stalled,
            finished=self.finished,
            key=authenticator.name_of(key) if authenticator else "",
            actors=len(live),
            max_actors=self._sockets.max_sessions,
            version=self._snapshots.version,
            snapshot_bytes=self._snapshots.nbytes,
            free_bytes=journal.free_bytes(store.journal.folder) if store else -1,
        ).encode()

    def _on_hello(self, identity: bytes, hello: handshake.Hello, peer: str, key: str) -> None:
        authenticator = self._sockets.authenticator
        try:
            if authenticator is not None and (why := authenticator.misnamed(key, hello.actor_id)):
                raise RefuseError(why)
            self._sessions.check(hello)  # first: an actor of another experiment need not wait for its refusal
            fields, arrays = self._handler.welcome()
            if hello.demonstrations and (digests := self._handler.digests()) is not None:
                arrays = arrays | {handshake.DEMONSTRATIONS: digests}
            # Last: an actor that is to come back later does not count as connected.
            admission = self._sessions.admit(hello, peer, time.monotonic())
        except RefuseError as e:
            self._counters["refused"] += not e.retry
            self._sockets.complain("control", peer, f"refused {hello.actor_id}: {e}")
            self._sockets.send("control", identity, handshake.refusal(str(e), retry=e.retry, renew=e.renew))
            return
        except SerlChunkError as e:
            self._sockets.send("control", identity, handshake.refusal(str(e), retry=True))
            return
        for old in admission.ousted:
            self._receiver.end_later(old, gone=True)
        session = admission.session
        connection = session.connection
        connection.control_id, connection.key, connection.version = identity, key, hello.version
        if admission.lost:
            self._counters["lost"] += admission.lost
            logger.error("%d records of actor %s never arrived and are no longer kept", admission.lost, hello.actor_id)
            self._receiver.end_later(session, gone=True, settle=True)
        header = {"token": connection.token, "known": admission.known, "fields": fields}
        header |= session.arrived | self._status_fields(session)
        try:
            answer = codec.encode(handshake.WELCOME, header, arrays)
        except WireError as e:  # our own fault, not the peer's
            raise SerlChunkError(f"the welcome cannot be sent: {e}") from e
        self._sockets.send("control", identity, answer)
        named = f", key {authenticator.name_of(key)}" if authenticator else ""
        if hello.demonstrations:
            logger.info("recording %s connected from %s%s, with demonstrations", hello.actor_id, peer, named)
        else:
            logger.info("actor %s connected from %s%s, with snapshot %d", hello.actor_id, peer, named, hello.version)

    def _session(self, message: Message, identity: bytes) -> Session | None:
        """Return the session of a message's token; a peer without one is requested to send a hello."""
        session = self._sessions.by_token(codec.field(message.header, "token", bytes))
        if session is None:
            self._counters["stale"] += 1
            if message.kind not in snapshots.REQUESTS:
                rejoin = codec.encode(handshake.REJOIN, {"token": message.header["token"]})
                self._sockets.send("control", identity, rejoin)
        return session

    def _status_fields(self, session: Session) -> dict[str, Any]:
        return {
            "next": self._receiver.safe(session),
            "stalled": self._receiver.waits(self._config.heartbeat),  # no reason for an actor to connect anew
            "busy": self._handler.busy(),
            **self._receiver.allowance_fields(session),
            "finished": self.finished,
            "run": self._run_id,
            "term": self._handler.term,
            "version": self._snapshots.version,
        }

    def _status(self, session: Session) -> None:
        self._counters["statuses"] += 1
        fields = self._status_fields(session)
        self._sockets.send("control", session.connection.control_id, codec.encode(handshake.STATUS, fields))

    def _grant(self, session: Session, *, answer: bool) -> None:
        """Send the tickets that a session shall hold, where they changed or it waits for an answer."""
        connection = session.connection
        if connection.tickets is None:
            return
        grant = self._handler.tickets(session.info.session, *connection.tickets)
        if grant is None or (grant == connection.grant_told and not answer):
            return
        if self._sockets.send("control", connection.control_id, encode_grant(grant)):
            connection.grant_told = grant

    def _drop_revoked(self, authenticator: Authenticator) -> None:
        for session in self._sessions:
            connection = session.connection
            if session.live and authenticator.gone(connection.key):
                sentence = authenticator.revoked(connection.key)
                logger.warning("actor %s (%s) is cut: %s", session.info.actor_id, session.info.peer, sentence)
                self._counters["refused"] += 1
                self._sockets.send("control", connection.control_id, handshake.refusal(sentence))
                self._sessions.fence(session)
                self._sessions.leave(session)
                self._receiver.end_later(session, gone=False)

    def tick(self) -> None:
        now = time.monotonic()
        if self._sockets.authenticator is not None and now >= self._keys_at:
            self._keys_at = now + _KEYS_S
            self._drop_revoked(self._sockets.authenticator)
        live = [s.connection for s in self._sessions if s.live]
        self._sockets.look(identity for c in live for identity in (c.data_id, c.snapshots_id, c.control_id))
        if now >= self._sessions_at:
            began = time.thread_time()
            for session in self._sessions:
                self._tick_session(session, now)
            # Of a thousand sessions this takes 3 ms, and each sends a sign of life a second.
            self._sessions_at = now + 4 * (time.thread_time() - began)
        self._snapshots.tick()

    def _tick_session(self, session: Session, now: float) -> None:
        connection = session.connection
        with self._sessions.lock:  # the data thread may hear of it now
            if not session.live:
                if now - connection.heard_at > self._episode_timeout:
                    self._receiver.end_later(session, gone=False)
                return
            if connection.is_silent(now, self._config.timeout_s):
                logger.warning("actor %s is silent", session.info.actor_id)
                self._sessions.leave(session, keep_parts=self._config.max_message_bytes)
                return
        # A session is allowed more once it is about to need it: one that has enough gets no message.
        if self._receiver.allowed(session) != connection.allowance_told or (
            self.finished is not None and not connection.finish_told
        ):
            connection.finish_told = self.finished is not None
            self._status(session)
        self._grant(session, answer=False)

"""The learner's answers on the control and snapshots channels, also while a record waits for disk or replay."""

from __future__ import annotations

import logging
import time
from typing import Any

from serl_chunk.transport.security.server import Authenticator, user_of
from serl_chunk.transport.server.handler import ServerHandler
from serl_chunk.transport.server.record_channel import RecordReceiver
from serl_chunk.transport.server.sessions import RefuseError, Session
from serl_chunk.transport.server.snapshot_channel import SnapshotChannel
from serl_chunk.transport.server.sockets import RateLimiter, address_of
from serl_chunk.transport.sockets import CHANNELS
from serl_chunk.transport.storage import files
from serl_chunk.transport.wire import handshake, probe
from serl_chunk.types import SerlChunkError
from serl_chunk_robot.wire import codec
from serl_chunk_robot.wire.codec import Frame, Message, WireError

logger = logging.getLogger(__name__)

_KEYS_S = 0.5  # between looks for revoked keys


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
        self._probes = RateLimiter(probe.AT_ONCE, probe.PER_S)  # of all peers together: one alone could connect again
        self._keys_at = 0.0  # when revoked keys are looked for next

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
        elif message.kind in (handshake.INSPECT, handshake.ECHO):
            dropped = self._probes.is_reached("")  # its sender notices
            self._counters["probes_dropped" if dropped else "probes"] += 1
            if not dropped:
                self._probes.add("")
                inspect = message.kind == handshake.INSPECT
                found = self._inspect(message, key) if inspect else probe.answer_echo(message)
                self._sockets.send("control", identity, found)
        elif (session := self._session(message, "control", identity)) is not None:
            session.connection.control_id = identity
            self._receive_of(session, message)

    def _receive_of(self, session: Session, message: Message) -> None:
        if message.kind == handshake.PING:
            session.connection.timeout_s = codec.field({"timeout_s": 0.0} | message.header, "timeout_s", float)
            self._status(session)
        elif message.kind == handshake.BYE:
            self._sessions.fence(session)
            self._sessions.leave(session)
            retired_at = codec.field({"retired_at": None} | message.header, "retired_at", (int, type(None)))
            self._receiver.end_later(session, gone=False, retire=retired_at == session.state.expected)
        elif message.kind == handshake.FETCH:
            self._snapshots.fetch(session, message)
        else:
            raise WireError(f"unknown kind {message.kind!r}")

    def _inspect(self, message: Message, key: str) -> list[Frame]:
        request = probe.StatusRequest.decode(message)
        live = [s for s in self._sessions if s.live]
        authenticator, store, not_ready = self._sockets.authenticator, self._receiver.store, ""
        try:
            self._handler.welcome()
        except SerlChunkError as e:
            not_ready = str(e)
        return probe.LearnerStatus(
            run=self._run_id,
            differs=handshake.compare(self._sessions.contract, request.contract) if request.contract else "",
            taken_by=next((s.info.peer for s in live if s.info.actor_id == request.actor_id), ""),
            not_ready=not_ready,
            stalled=self._receiver.stalled,
            finished=self.finished,
            key=authenticator.name_of(key) if authenticator else "",
            actors=len(live),
            max_actors=self._config.max_sessions,
            version=self._snapshots.version,
            snapshot_bytes=self._snapshots.nbytes,
            free_bytes=files.free_bytes(store.journal.folder) if store else -1,
        ).encode()

    def _on_hello(self, identity: bytes, hello: handshake.Hello, peer: str, key: str) -> None:
        try:
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
        connection.control_id, connection.key = identity, key
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
        named = f", key {self._sockets.authenticator.name_of(key)}" if self._sockets.authenticator else ""
        if hello.demonstrations:
            logger.info("recording %s connected from %s%s, with demonstrations", hello.actor_id, peer, named)
        else:
            logger.info("actor %s connected from %s%s, with snapshot %d", hello.actor_id, peer, named, hello.version)

    def _session(self, message: Message, channel: str, identity: bytes) -> Session | None:
        """Return the session of a message's token; a peer without one is requested to send a hello."""
        session = self._sessions.by_token(codec.field(message.header, "token", bytes))
        if session is None:
            self._counters["stale"] += 1
            if channel == "control":
                self._sockets.send_outgoing()  # the reason why it has no session, where it was just refused
                rejoin = codec.encode(handshake.REJOIN, {"token": message.header["token"]})
                self._sockets.send(channel, identity, rejoin)
        return session

    def _status_fields(self, session: Session) -> dict[str, Any]:
        return {
            "next": self._receiver.safe(session),
            "stalled": self._receiver.waits(self._config.heartbeat),  # no reason for an actor to connect anew
            **self._receiver.allowance_fields(session),
            "finished": self.finished,
            "run": self._run_id,
            "version": self._snapshots.version,
        }

    def _status(self, session: Session) -> None:
        self._counters["statuses"] += 1
        fields = self._status_fields(session)
        self._sockets.send("control", session.connection.control_id, codec.encode(handshake.STATUS, fields))

    def receive_snapshots(self, identity: bytes, frames: list[Frame]) -> None:
        message = codec.decode(frames, self._limits)
        session = self._session(message, "snapshots", identity)
        if session is not None:
            session.connection.snapshots_id = identity
            self._snapshots.receive(session, message)

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
        self._sockets.send_outgoing()
        now = time.monotonic()
        if self._sockets.authenticator is not None and now >= self._keys_at:
            self._keys_at = now + _KEYS_S
            self._drop_revoked(self._sockets.authenticator)
        self._sockets.guard.look(
            peer for s in self._sessions if s.live for peer in zip(CHANNELS, s.connection.socket_ids, strict=True)
        )
        for session in self._sessions:
            self._tick_session(session, now)
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

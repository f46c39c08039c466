"""The learner's end of the transport."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np

from serl_chunk.config.transport import TransportConfig
from serl_chunk.transport import sockets
from serl_chunk.transport.security.keys import ServerKeys
from serl_chunk.transport.security.server import Authenticator, user_of
from serl_chunk.transport.server.record_channel import RecordReceiver
from serl_chunk.transport.server.sessions import RefuseError, Session, SessionInfo, Sessions
from serl_chunk.transport.server.snapshot_channel import SnapshotChannel
from serl_chunk.transport.server.snapshot_publisher import Fetch, Publisher
from serl_chunk.transport.server.sockets import PeerRateLimiter, ServerSockets, address_of
from serl_chunk.transport.sockets import Counters, Waker
from serl_chunk.transport.storage.record_store import RecordStore
from serl_chunk.transport.wire import codec, handshake, message_types, probe
from serl_chunk.transport.wire.codec import Frame, Limits, Message, WireError
from serl_chunk.types import ConfigError, Record, SerlChunkError, Snapshot

log = logging.getLogger(__name__)

_POLL_S = 0.02  # how long a changed allowance waits at most where `push_allowances` is not called
_KEYS_S = 0.5  # between looks for revoked keys
_BATCH = 64  # messages taken from one socket before the others get their turn


class LearnerServer:
    """Receives the actors' records exactly once and in order; hands out snapshots and allowances.

    One thread owns three ROUTER sockets and calls every callback given here; a callback that is slow delays
    acknowledgements, nothing else. What a peer sends can be refused, counted or dropped; it cannot stop the thread.
    An unforeseen exception, a callback's included, does: then `check` raises.
    """

    def __init__(
        self,
        config: TransportConfig,
        *,
        bind: str,
        port: int,
        contract: dict[str, str],
        welcome: Callable[[], tuple[dict[str, Any], dict[str, np.ndarray]]],
        on_record: Callable[[SessionInfo, Record], None],
        allowance: Callable[[str], int | None] = lambda session: None,
        on_silent: Callable[[SessionInfo, bool], None] = lambda info, gone: None,
        fetch: Fetch | None = None,
        run_id: str | None = None,
        episode_timeout: float | None = None,
        insecure: bool = False,
        store: RecordStore | None = None,
        keys: ServerKeys | None = None,
    ) -> None:
        """
        Args:
            bind, port: address to listen on; `port` and the two after it are used.
            contract: named values an actor must share; compared as strings.
            welcome: plain values and arrays for a new actor. A SerlChunkError refuses it with that sentence, for now.
            on_record: takes one record; the acknowledgement follows its return. DataError refuses the session.
                A `Begin` may follow an episode without an `End`: the actor died in it. Arrays are read-only views.
            allowance: session id -> number of that session's steps (as delivered to `on_record`) it may have
                recorded in all; None for no limit. Cheap: called many times a second.
            on_silent: (session, gone). A session left, or was silent for `episode_timeout` seconds (default
                `config.timeout_s`): called once per silence. With `gone` its open episode is over, else it may go on.
            fetch: reads a checkpoint, in its own thread.
            run_id: the same for every learner of one run, resumed or not; random by default. No record goes from
                one run into another, and no snapshot version goes back within one.
            store: where records are written before `on_record` (see `resume`); a full disk stops acknowledgements.
            keys: let in machines that have joined with them, and no others; all is encrypted. Revoked keys are cut.
            insecure: without keys, permit an address that other machines reach.

        Raises ConfigError for a port in use, an address that is not this machine's, or a refused bind.
        """
        sockets.check_port(port)
        if keys is None and not insecure and not sockets.is_loopback(bind):
            raise ConfigError(
                f"--bind={bind} lets other machines connect, without encryption or authentication. Make keys with "
                "`serl-chunk keys init`, use 127.0.0.1 for actors on this machine, or add --insecure if every machine "
                "on that network may be trusted"
            )
        self.run_id = run_id or uuid.uuid4().hex
        self._config = config
        self._limits = Limits(config.max_message_bytes, config.max_arrays)
        self._welcome = welcome
        self._episode_timeout = config.timeout_s if episode_timeout is None else episode_timeout
        self._sessions = Sessions(
            dict(contract), self.run_id, config.max_sessions, store.session_state if store else lambda s: None
        )
        self._store = store
        self._finished: str | None = None
        self._error: BaseException | None = None
        self._stop = False
        self._counters = Counters(
            "records", "steps", "received_bytes", "duplicates", "gaps", "orphans", "lost", "malformed", "ignored",
            "stale", "rejected", "refused", "replies_dropped", "parts", "pieces", "snapshot_bytes",
            "keys_refused", "handshakes_failed", "probes", "probes_dropped",
        )  # fmt: skip
        self._sockets = ServerSockets(config, bind, port, self._counters, keys)
        self._keys_at = 0.0  # when revoked keys are looked for next
        self._peer_limits = PeerRateLimiter(config.max_malformed)
        self._probes = probe.ProbeRateLimit(self._counters)
        self._waker = Waker()
        self._publisher = Publisher(fetch, self._waker.wake, self._fail, run=self.run_id, dtype=config.snapshot_dtype)
        self._snapshots = SnapshotChannel(self._sockets, self._publisher, self._counters, config.max_message_bytes)
        self._receiver = RecordReceiver(
            self._sockets, self._sessions, self._counters, self._limits,
            on_record=on_record, on_silent=on_silent, allowance=allowance,
            store=store, wait_for_disk=config.durability == "power",
        )  # fmt: skip
        self._thread = threading.Thread(target=self._run, name="serl-chunk-server", daemon=True)

    # The learner's thread.

    def start(self) -> None:
        """Start to serve."""
        self._thread.start()

    def resume(self) -> None:
        """Let the sessions in the store go on where they were. After it was read back, before `welcome` lets one in."""
        if self._store is not None:
            self._sessions.restore(self._store.session_states(), time.monotonic())
            self._receiver.retain()

    def publish(self, snapshot: Snapshot, info: dict[str, Any]) -> None:
        """Offer newer parameters, with plain values about them; returns at once.

        Leaves may be anything `np.asarray` takes (it runs in a worker thread) with a `dtype`; they must not change
        afterwards. Raises ConfigError where the version does not go up, and what `check` raises.
        """
        self.check()
        self._publisher.publish(snapshot, info)

    def finish(self, reason: str) -> None:
        """Tell every actor, and any that still comes, that training is over."""
        self._finished = reason
        self._waker.wake()

    @property
    def stalled(self) -> str:
        """Why no record is taken now; empty where they are."""
        return self._receiver.stalled

    def push_allowances(self) -> None:
        """The allowances changed: tell the actors now."""
        self._waker.wake()

    def check(self) -> None:
        """Raise SerlChunkError if the server's thread has stopped on an error."""
        if self._error is not None:
            raise SerlChunkError(f"the transport stopped: {type(self._error).__name__}: {self._error}") from self._error

    def stats(self) -> dict[str, float]:
        """Counts since the start, rates over the last seconds."""
        live = [s for s in self._sessions if s.live]
        return {
            **self._counters,
            "sessions": len(live),
            "steps_per_s": self._receiver.rate.per_second(),
            "insert_s": self._receiver.insert_s,
            "journal_s": self._receiver.journal_s,
            "stalled": float(bool(self._receiver.stalled)),
            "snapshot_version": self._snapshots.version,
            "snapshot_prepare_s": self._publisher.prepare_s,
            "snapshots_superseded": self._publisher.superseded,
        }

    def sessions(self) -> list[dict[str, Any]]:
        """Every session known, live or not, as plain values."""
        now = time.monotonic()
        return [s.report(now) for s in self._sessions]

    def close(self) -> None:
        """Stop serving and release the ports; what was not acknowledged stays with the actors."""
        self._stop = True
        self._waker.wake()
        if self._thread.ident is not None:
            self._thread.join()
        self._publisher.close()
        self._sockets.close()
        self._waker.close()

    # The server's thread.

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as e:
            self._fail(e)
            raise

    def _serve(self) -> None:
        handlers = {"control": self._on_control, "data": self._receiver.receive, "snapshots": self._on_snapshots}
        while not self._stop:
            ready = self._sockets.wait(self._waker, _POLL_S)
            for channel, handler in handlers.items():  # control first: heartbeats wait for nothing
                for _ in range(_BATCH if channel in ready else 0):
                    frames = self._sockets.receive(channel)
                    if frames is None:
                        break
                    identity = frames[0].bytes
                    if self._peer_limits.is_blocked(channel, identity):
                        self._counters["ignored"] += 1
                        continue
                    try:
                        handler(identity, list(frames[1:]))
                    except WireError as e:
                        self._counters["malformed"] += 1
                        self._sockets.complain(channel, address_of(frames), f"malformed: {e}")
                        if self._peer_limits.record_error(channel, identity):
                            self._sockets.complain(channel, address_of(frames), "too many malformed: not read for now")
            self._receiver.acknowledge()
            self._tick()

    # Control.

    def _on_control(self, identity: bytes, frames: list[Frame]) -> None:
        message = codec.decode(frames, self._limits)
        authenticator = self._sockets.authenticator
        if authenticator is not None:
            answer = authenticator.answer(message, user_of(frames), address_of(frames))
            if answer is not None:
                self._sockets.send("control", identity, answer)
                return
        if message.kind == message_types.WHO:
            theirs = codec.count(message.header, "protocol")
            sentence = handshake.compare_protocol(theirs)
            answer = (
                handshake.refusal(sentence) if sentence else codec.encode(message_types.IDENTITY, {"run": self.run_id})
            )
            self._sockets.send("control", identity, answer)
            return
        if message.kind == handshake.HELLO:
            self._on_hello(identity, handshake.Hello.decode(message), address_of(frames), user_of(frames))
            return
        if message.kind in (message_types.INSPECT, message_types.ECHO):
            if self._probes.take():
                inspect = message.kind == message_types.INSPECT
                answer = self._inspect(message, user_of(frames)) if inspect else probe.answer_echo(message)
                self._sockets.send("control", identity, answer)
            return
        session = self._session(message, "control", identity)
        if session is None:
            return
        session.control_id = identity
        if message.kind == message_types.PING:
            session.patience = codec.field({"patience": 0.0} | message.header, "patience", float)
            self._status(session)
        elif message.kind == message_types.BYE:
            self._sessions.fence(session)
            self._sessions.leave(session)
            self._receiver.close_episode(session)
        elif message.kind == message_types.FETCH:
            self._snapshots.fetch(session, message)
        else:
            raise WireError(f"unknown kind {message.kind!r}")

    def _inspect(self, message: Message, key: str) -> list[Frame]:
        """What an actor would be told, and how this learner stands; no peer is admitted."""
        asked = probe.StatusRequest.decode(message)
        live = [s for s in self._sessions if s.live]
        authenticator = self._sockets.authenticator
        try:
            not_ready = ""
            self._welcome()
        except SerlChunkError as e:
            not_ready = str(e)
        return probe.LearnerStatus(
            run=self.run_id,
            differs=self._sessions.compare(asked.contract) if asked.contract else "",
            taken_by=next((s.info.peer for s in live if s.info.actor_id == asked.actor_id), ""),
            not_ready=not_ready,
            stalled=self._receiver.stalled,
            finished=self._finished,
            key=authenticator.name_of(key) if authenticator else "",
            actors=len(live),
            max_actors=self._config.max_sessions,
            version=self._snapshots.version,
            snapshot_bytes=self._snapshots.nbytes,
            free_bytes=self._store.free_bytes() if self._store else -1,
        ).encode()

    def _on_hello(self, identity: bytes, hello: handshake.Hello, peer: str, key: str) -> None:
        try:
            self._sessions.check(hello)  # first: an actor of another experiment need not wait to be told
            fields, arrays = self._welcome()
            # Last: an actor that is to come back later must not count as connected meanwhile.
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
            self._receiver.close_episode(old, gone=True)
        session = admission.session
        session.control_id, session.key = identity, key
        if admission.lost:
            self._counters["lost"] += admission.lost
            log.error("%d records of actor %s never arrived and are no longer kept", admission.lost, hello.actor_id)
            self._receiver.settle(session)
        header = {"token": session.token, "known": admission.known, "fields": fields}
        header |= session.arrived | self._status_fields(session)
        try:
            answer = codec.encode(handshake.WELCOME, header, arrays)
        except WireError as e:  # our own fault, not the peer's
            raise SerlChunkError(f"the welcome cannot be sent: {e}") from e
        self._sockets.send("control", identity, answer)
        named = f", key {self._sockets.authenticator.name_of(key)}" if self._sockets.authenticator else ""
        log.info("actor %s connected from %s%s, with snapshot %d", hello.actor_id, peer, named, hello.version)

    def _session(self, message: Message, channel: str, identity: bytes) -> Session | None:
        """The session of a message's token; a stranger is told to introduce itself."""
        session = self._sessions.by_token(codec.field(message.header, "token", bytes))
        if session is None:
            self._counters["stale"] += 1
            if channel == "control":
                self._sockets.send(
                    channel, identity, codec.encode(message_types.REJOIN, {"token": message.header["token"]})
                )
            return None
        session.hear()
        return session

    def _status_fields(self, session: Session) -> dict[str, Any]:
        return {
            "next": self._receiver.safe(session),
            "stalled": self._receiver.stalled,
            "allowance": self._receiver.allowed(session),
            "finished": self._finished,
            "run": self.run_id,
            "version": self._snapshots.version,
        }

    def _status(self, session: Session) -> None:
        fields = self._status_fields(session)
        self._sockets.send("control", session.control_id, codec.encode(message_types.STATUS, fields))

    def _on_snapshots(self, identity: bytes, frames: list[Frame]) -> None:
        message = codec.decode(frames, self._limits)
        session = self._session(message, "snapshots", identity)
        if session is not None:
            session.snapshots_id = identity
            self._snapshots.receive(session, message)

    # What happens without a message.

    def _drop_revoked(self, authenticator: Authenticator) -> None:
        """Cut the sessions whose key was revoked. With another key they may come back and go on."""
        for session in self._sessions:
            if session.live and authenticator.gone(session.key):
                sentence = authenticator.revoked(session.key)
                log.warning("actor %s (%s) is cut: %s", session.info.actor_id, session.info.peer, sentence)
                self._counters["refused"] += 1
                self._sockets.send("control", session.control_id, handshake.refusal(sentence))
                self._sessions.fence(session)
                self._sessions.leave(session)
                self._receiver.close_episode(session)

    def _tick(self) -> None:
        new_snapshot = self._snapshots.renew()
        now = time.monotonic()
        self._receiver.maintain(now)
        if self._sockets.authenticator is not None and now >= self._keys_at:
            self._keys_at = now + _KEYS_S
            self._drop_revoked(self._sockets.authenticator)
        for session in self._sessions:
            if not session.live:
                if now - session.heard > self._episode_timeout:
                    self._receiver.close_episode(session)
                continue
            if session.is_silent(now, self._config.timeout_s):
                log.warning("actor %s is silent", session.info.actor_id)
                self._sessions.leave(session, keep_parts=self._config.max_message_bytes)
                continue
            if new_snapshot:
                self._snapshots.announce(session)
            told = session.allowance_told
            if self._receiver.allowed(session) != told or (self._finished is not None and not session.finish_told):
                session.finish_told = self._finished is not None
                self._status(session)
        while self._publisher.fetched:
            answer = self._publisher.fetched.popleft()
            self._snapshots.answer(self._sessions.by_session(answer.session), answer)

"""The learner's end of the transport."""

from __future__ import annotations

import errno
import logging
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import zmq

from serl_chunk.config.experiment import TransportConfig
from serl_chunk.transport import handshake, kinds, records, snapshots, sockets, wire
from serl_chunk.transport.publisher import Fetch, Publisher
from serl_chunk.transport.sessions import Gap, RefuseError, Session, SessionInfo, Sessions
from serl_chunk.transport.snapshots import Published
from serl_chunk.transport.sockets import CHANNELS, Waker, endpoint, try_send
from serl_chunk.transport.stats import Counters, Rate
from serl_chunk.transport.wire import Frame, Limits, Message, WireError
from serl_chunk.types import ConfigError, DataError, Record, SerlChunkError, Snapshot, StepBlock

log = logging.getLogger(__name__)

_POLL_S = 0.02  # how long a changed allowance waits at most where nobody calls `poke`
_BATCH = 64  # messages taken from one socket before the others get their turn
_LOG_LIMIT = 256  # distinct complaints logged; more are only counted


class LearnerServer:
    """Receives the actors' records exactly once and in order; hands out snapshots and allowances.

    One thread owns three ROUTER sockets and calls every callback given here; a callback that is slow delays
    acknowledgements, nothing else. What a peer sends can be refused, counted or dropped; it cannot stop the thread.
    An exception that nobody foresaw, a callback's included, does: then `check` raises.
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
        on_silent: Callable[[SessionInfo], None] = lambda info: None,
        fetch: Fetch | None = None,
        run_id: str | None = None,
        episode_timeout: float | None = None,
        insecure: bool = False,
    ) -> None:
        """
        Args:
            bind, port: address to listen on; `port` and the two after it are used.
            contract: named values an actor must share; compared as strings.
            welcome: plain values and arrays for a new actor. A SerlChunkError refuses it with that sentence, for now.
            on_record: takes one record; the acknowledgement follows its return. DataError refuses the session with
                that sentence. This is where a journal is written and rows are inserted. A `Begin` may follow an
                episode that never got its `End`: the actor died in it. Arrays are read-only views of the message.
            allowance: session id -> number of that session's steps (as delivered to `on_record`) it may have
                recorded in all; None for no limit. Cheap: called many times a second.
            on_silent: a session left, was replaced, or was silent for `episode_timeout` seconds (default
                `config.silence`). Called once per silence. Its open episode will not be continued: what still comes
                of it is dropped and counted.
            fetch: reads a checkpoint, in a thread of its own.
            run_id: the same for every learner of one run, resumed or not; random by default. An actor's records never
                go from one run into another, and its snapshot version never goes back within one.
            insecure: permit an address that other machines reach; nothing is encrypted or authenticated.

        Raises ConfigError for a port in use, an address that is not this machine's, or a refused bind.
        """
        sockets.check_port(port)
        if not insecure and not sockets.is_loopback(bind):
            raise ConfigError(
                f"--bind={bind} lets other machines connect, without encryption or authentication. Use 127.0.0.1 for "
                "actors on this machine, or add --insecure if everybody on that network may be trusted"
            )
        self.run_id = run_id or uuid.uuid4().hex
        self._config = config
        self._limits = Limits(config.max_message_bytes, config.max_arrays)
        self._welcome, self._on_record = welcome, on_record
        self._allowance, self._on_silent = allowance, on_silent
        self._episode_timeout = config.silence if episode_timeout is None else episode_timeout
        self._sessions = Sessions(dict(contract), self.run_id, config.max_sessions)
        self._finished: str | None = None
        self._announced: Published | None = None
        self._error: BaseException | None = None
        self._stop = False
        self._counters = Counters(
            "records", "steps", "received_bytes", "duplicates", "gaps", "orphans", "lost", "malformed", "stale",
            "rejected", "refused", "abandoned", "replies_dropped", "pieces", "snapshot_bytes",
        )  # fmt: skip
        self._rate = Rate()
        self._insert_s = 0.0  # time spent in on_record
        self._complaints: set[tuple[str, str, str]] = set()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._bind(bind, port)
        self._waker = Waker()
        self._publisher = Publisher(fetch, self._waker.wake, self._fail)
        self._thread = threading.Thread(target=self._run, name="serl-chunk-server", daemon=True)

    def _bind(self, bind: str, port: int) -> None:
        for offset, channel in enumerate(CHANNELS):
            s = self._sockets[channel] = sockets.make_socket(self._context, zmq.ROUTER, self._config)
            try:
                s.bind(endpoint("127.0.0.1" if bind == "localhost" else bind, port + offset))
            except zmq.ZMQError as e:
                self._context.destroy(linger=0)
                if e.errno == errno.EADDRINUSE:
                    raise ConfigError(
                        f"port {port + offset} of {bind} is in use: another learner may be running there. Stop it, or "
                        f"choose another --port (three are used: {port}, {port + 1}, {port + 2}) for learner and actors"
                    ) from e
                raise ConfigError(f"cannot listen on --bind={bind} port {port + offset}: {e.strerror}") from e

    # The learner's thread.

    def start(self) -> None:
        """Start to serve."""
        self._thread.start()

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

    def poke(self) -> None:
        """The allowances changed: tell the actors now."""
        self._waker.wake()

    @property
    def version_floor(self) -> int:
        """Newest snapshot version that an actor of this run said it holds, -1 for none: publish above it."""
        return self._sessions.version_floor

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
            "steps_per_s": self._rate.per_second(),
            "insert_s": self._insert_s,
            "snapshot_version": self._announced.manifest.version if self._announced else -1,
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
        self._context.destroy(linger=0)
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
        poller = zmq.Poller()
        for s in self._sockets.values():
            poller.register(s, zmq.POLLIN)
        poller.register(self._waker.fileno(), zmq.POLLIN)
        handlers = {"control": self._on_control, "data": self._on_data, "snapshots": self._on_snapshots}
        while not self._stop:
            ready = dict(poller.poll(round(1000 * _POLL_S)))
            if self._waker.fileno() in ready:
                self._waker.drain()
            touched: set[Session] = set()
            for channel, handler in handlers.items():  # control first: heartbeats wait for nobody
                s = self._sockets[channel]
                for _ in range(_BATCH if s in ready else 0):
                    try:
                        frames = s.recv_multipart(zmq.NOBLOCK, copy=False)
                    except zmq.Again:
                        break
                    self._handle(channel, handler, frames, touched)
            for session in touched:
                self._ack(session)
            self._tick()

    def _handle(
        self,
        channel: str,
        handler: Callable[[bytes, list[Frame], set[Session]], None],
        frames: list[zmq.Frame],
        touched: set[Session],
    ) -> None:
        """One message of one peer. Nothing in it may raise."""
        try:
            handler(frames[0].bytes, list(frames[1:]), touched)
        except WireError as e:
            self._counters["malformed"] += 1
            self._complain(channel, _peer(frames), f"malformed: {e}")

    def _complain(self, channel: str, peer: str, what: str) -> None:
        """Log once per channel, peer and kind of trouble."""
        key = (channel, peer, what.split(":")[0])
        if key not in self._complaints and len(self._complaints) < _LOG_LIMIT:
            self._complaints.add(key)
            log.warning("%s message from %s: %s (logged once, counted always)", channel, peer, what)

    def _send(self, channel: str, identity: bytes, frames: list[Frame]) -> bool:
        """Send to one peer; a peer that is gone or does not read is counted. Every answer is repeatable."""
        sent = bool(identity) and try_send(self._sockets[channel], [identity, *frames])
        self._counters["replies_dropped"] += not sent
        return sent

    # Data.

    def _on_data(self, identity: bytes, frames: list[Frame], touched: set[Session]) -> None:
        if not frames:
            raise WireError("no frames")
        session = self._sessions.by_token(_bytes(frames[0]))
        if session is None:
            self._counters["stale"] += 1
            return
        self._hear(session)
        if session not in touched:
            touched.add(session)
            session.data_id = identity
        try:
            message = wire.decode(frames[1:], self._limits)
            first, record = records.decode_record(message)
        except WireError as e:
            # It holds a valid token, so this is no stranger's garbage: the actor would resend it for ever.
            self._refuse(session, f"record after {session.expected} of this session is malformed: {e}")
            raise
        self._counters["received_bytes"] += message.nbytes
        self._take(session, first, record)

    def _take(self, session: Session, first: int, record: Record) -> None:
        before = session.duplicates
        try:
            new = session.trim(first, record)
        except Gap as e:
            self._counters["gaps"] += 1
            self._complain("data", session.info.peer, f"gap: {e}")
            if session.gap_told != session.expected:  # once: what is in flight has the same gap
                session.gap_told = session.expected
                self._ack(session, gap=True)
            return
        self._counters["duplicates"] += session.duplicates - before
        if new is None:
            return
        follows = session.follows(new)
        if follows:
            start = time.monotonic()
            try:
                # A journal's write belongs here, before the insert; the acknowledgement follows both.
                self._on_record(session.info, new)
            except DataError as e:
                self._counters["rejected"] += 1
                self._refuse(session, str(e))
                return
            self._insert_s += time.monotonic() - start
        else:
            self._complain(
                "data", session.info.peer, f"orphans of {session.info.actor_id}: their episode is not open here"
            )
            self._counters["orphans"] += records.count_of(new)
        session.advance(new, delivered=follows)
        self._counters["records"] += records.count_of(new) if follows else 0
        if follows and isinstance(new, StepBlock):
            self._counters["steps"] += new.n
            self._rate.add(new.n)

    def _ack(self, session: Session, *, gap: bool = False) -> None:
        """Cumulative: everything below `next` was taken."""
        if not session.refused:
            fields = {"next": session.expected, "gap": gap, "allowance": self._allowed(session)}
            self._send("data", session.data_id, wire.encode(kinds.ACK, fields))

    def _refuse(self, session: Session, reason: str) -> None:
        """End a session for good: what it sends cannot be taken, and going on would lose it."""
        log.error("actor %s (%s) is refused: %s", session.info.actor_id, session.info.peer, reason)
        self._counters["refused"] += 1
        session.refused = reason
        self._send("control", session.control_id, handshake.refusal(reason))
        self._sessions.fence(session)
        self._sessions.leave(session)
        self._close_episode(session)

    # Control.

    def _on_control(self, identity: bytes, frames: list[Frame], touched: set[Session]) -> None:
        message = wire.decode(frames, self._limits)
        if message.kind == handshake.HELLO:
            self._on_hello(identity, handshake.Hello.decode(message), _peer(frames))
            return
        session = self._session(message, "control", identity)
        if session is None:
            return
        session.control_id = identity
        if message.kind == kinds.PING:
            self._status(session)
        elif message.kind == kinds.BYE:
            self._sessions.fence(session)
            self._sessions.leave(session)
            self._close_episode(session)
        elif message.kind == kinds.FETCH:
            self._fetch(session, wire.count(message.header, "request"), wire.text(message.header, "step", 64))
        else:
            raise WireError(f"unknown kind {message.kind!r}")

    def _on_hello(self, identity: bytes, hello: handshake.Hello, peer: str) -> None:
        try:
            self._sessions.check(hello)  # first: an actor of another experiment need not wait to be told
            fields, arrays = self._welcome()
            # Last: an actor that is to come back later must not count as connected meanwhile.
            admission = self._sessions.admit(hello, peer, time.monotonic())
        except RefuseError as e:
            self._counters["refused"] += not e.retry
            self._complain("control", peer, f"refused {hello.actor_id}: {e}")
            self._send("control", identity, handshake.refusal(str(e), retry=e.retry))
            return
        except SerlChunkError as e:
            self._send("control", identity, handshake.refusal(str(e), retry=True))
            return
        for old in admission.ousted:
            self._close_episode(old)
        session = admission.session
        session.control_id = identity
        if admission.lost:
            self._counters["lost"] += admission.lost
            log.error("%d records of actor %s never arrived and are no longer kept", admission.lost, hello.actor_id)
        if admission.abandoned:
            self._counters["abandoned"] += admission.abandoned
            log.warning("actor %s leaves %d records of another run behind", hello.actor_id, admission.abandoned)
        header = {
            "token": session.token,
            "known": admission.known,
            "abandoned": admission.abandoned > 0,
            "fields": fields,
            **self._news(session),
        }
        try:
            answer = wire.encode(handshake.WELCOME, header, arrays)
        except WireError as e:  # our own fault, not the peer's
            raise SerlChunkError(f"the welcome cannot be sent: {e}") from e
        self._send("control", identity, answer)
        log.info("actor %s connected from %s", hello.actor_id, peer)

    def _session(self, message: Message, channel: str, identity: bytes) -> Session | None:
        """The session of a message's token; a stranger is told to introduce itself."""
        session = self._sessions.by_token(wire.field(message.header, "token", bytes))
        if session is None:
            self._counters["stale"] += 1
            if channel == "control":
                self._send(channel, identity, wire.encode(kinds.REJOIN, {"token": message.header["token"]}))
            return None
        self._hear(session)
        return session

    def _hear(self, session: Session) -> None:
        session.heard = time.monotonic()
        if not session.live:
            session.live, session.closed = True, False

    def _news(self, session: Session) -> dict[str, Any]:
        return {
            "next": session.expected,
            "allowance": self._allowed(session),
            "finished": self._finished,
            "run": self.run_id,
            "version": self._announced.manifest.version if self._announced else -1,
        }

    def _status(self, session: Session) -> None:
        self._send("control", session.control_id, wire.encode(kinds.STATUS, self._news(session)))

    def _allowed(self, session: Session) -> int | None:
        """The allowance in the actor's own count of steps."""
        allowed = self._allowance(session.info.session)
        session.allowance_told = None if allowed is None else allowed + session.steps_offset
        return session.allowance_told

    def _fetch(self, session: Session, request: int, step: str) -> None:
        if session.fetch_request is None:
            session.fetch_request = request
            self._publisher.request(session.info.session, request, step)
        elif session.fetch_request != request:
            fields = {"request": request, "reason": "another checkpoint is being fetched for this actor"}
            self._send("control", session.control_id, wire.encode(kinds.FETCH_FAILED, fields))

    # Snapshots.

    def _on_snapshots(self, identity: bytes, frames: list[Frame], touched: set[Session]) -> None:
        message = wire.decode(frames, self._limits)
        session = self._session(message, "snapshots", identity)
        if session is None:
            return
        session.snapshots_id = identity
        if message.kind == snapshots.SUBSCRIBE:
            session.holds = wire.field(message.header, "version", int)
            session.pulling = None
            self._announce(session)
        elif message.kind == snapshots.PULL:
            self._pull(session, message)
        elif message.kind == snapshots.RELEASE:
            session.fetched = None
        else:
            raise WireError(f"unknown kind {message.kind!r}")

    def _announce(self, session: Session) -> None:
        """Tell a session that waits of a newer snapshot, once."""
        newest = self._announced
        if (
            newest is not None
            and session.holds is not None
            and newest.manifest.version > session.holds
            and self._send("snapshots", session.snapshots_id, newest.announcement)
        ):
            session.holds, session.pulling = None, newest

    def _pull(self, session: Session, message: Message) -> None:
        key = wire.text(message.header, "key")
        for published in (session.pulling, session.fetched, self._announced):
            if published is not None and published.manifest.key == key:
                frames = published.piece(message, self._config.max_message_bytes)
                self._counters["pieces"] += 1
                self._counters["snapshot_bytes"] += wire.size_of(frames)
                self._send("snapshots", session.snapshots_id, frames)
                return
        self._send("snapshots", session.snapshots_id, wire.encode(snapshots.GONE, {"key": key}))

    # What happens without a message.

    def _tick(self) -> None:
        newest = self._publisher.newest
        new_snapshot = newest is not self._announced
        self._announced = newest
        now = time.monotonic()
        for session in self._sessions:
            if not session.live:
                if now - session.heard > self._episode_timeout:
                    self._close_episode(session)
                continue
            if now - session.heard > self._config.silence:
                log.warning("actor %s is silent", session.info.actor_id)
                self._sessions.leave(session)
                continue
            if new_snapshot:
                self._announce(session)
            told = session.allowance_told
            if self._allowed(session) != told or (self._finished is not None and not session.finish_told):
                session.finish_told = self._finished is not None
                self._status(session)
        while self._publisher.fetched:
            self._answer_fetch(self._publisher.fetched.popleft())

    def _answer_fetch(self, answer: Any) -> None:
        session = self._sessions.by_session(answer.session)
        if session is None or session.fetch_request != answer.request:
            return
        session.fetch_request, session.fetched = None, answer.published
        if answer.published is None:
            frames = wire.encode(kinds.FETCH_FAILED, {"request": answer.request, "reason": answer.reason})
        else:
            frames = wire.encode(kinds.FETCHED, {"request": answer.request, **answer.published.manifest.header()})
        self._send("control", session.control_id, frames)

    def _close_episode(self, session: Session) -> None:
        """The session's open episode ends here, once."""
        if not session.closed:
            session.closed = True
            session.open_episode = None
            self._on_silent(session.info)


def _bytes(frame: Frame) -> bytes:
    return frame.bytes if isinstance(frame, zmq.Frame) else bytes(frame)


def _peer(frames: list[Any]) -> str:
    """The network address a received message came from."""
    try:
        return str(frames[-1].get("Peer-Address")).removeprefix("::ffff:") if frames else "unknown"
    except zmq.ZMQError:  # a transport without addresses
        return "unknown"

"""The network thread of an actor: one connection to a learner, reopened whenever it breaks."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from typing import Any

import zmq

from serl_chunk.config.transport import TransportConfig
from serl_chunk.transport.client.flow import AdaptiveTimeout
from serl_chunk.transport.client.outbox import Arrived, Outbox
from serl_chunk.transport.client.snapshots import FetchError, FetchRequest, SnapshotClient
from serl_chunk.transport.security.client import KeyExchange
from serl_chunk.transport.security.keys import ClientKeys
from serl_chunk.transport.sockets import CHANNELS
from serl_chunk.transport.wire import handshake
from serl_chunk.transport.wire.handshake import Hello, RefusedError, Welcome
from serl_chunk.transport.wire.snapshots import Manifest
from serl_chunk.types import SerlChunkError
from serl_chunk_robot.wire import codec
from serl_chunk_robot.wire.codec import Limits, Message, WireError
from serl_chunk_robot.wire.sockets import try_receive, try_send

log = logging.getLogger(__name__)

_GOODBYE_MS = 200  # how long `close` waits for its goodbye to leave


class Connection:
    """Three DEALER sockets and a thread, which sends what the outbox holds and pulls the newest snapshot.

    Attributes that other threads read are written whole; `news` is notified after each change.
    """

    def __init__(
        self, config: TransportConfig, host: str, port: int, actor_id: str, contract: dict[str, str], out: Outbox,
        keys: ClientKeys | None, *, demonstrations: bool = False,
    ) -> None:  # fmt: skip
        self.error: SerlChunkError | None = None  # why it is permanently disconnected
        self.finished: str | None = None  # why training is over
        self.stalled = ""  # why the learner takes no records now
        self.allowance: int | None = None  # steps the session may have recorded in all; None for no limit
        self.welcome: Welcome | None = None  # of the newest connection; None until `run` has sent one
        self.run = ""  # id of the run that answers, whose spool the outbox has; changes before `welcome`
        self.waiting = f"no learner answers at {host}:{port}"  # why there is no welcome yet
        self.news = threading.Condition()
        self._config = config
        self._limits = Limits(config.max_message_bytes + codec.MAX_HEADER_BYTES, config.max_arrays)
        self._host, self._port = host, port
        self._actor_id, self._contract, self._demonstrations = actor_id, dict(contract), demonstrations
        self._session = uuid.uuid4().hex  # where no spool names one
        self._out, self._snapshots = out, SnapshotClient(config.piece_bytes, config.timeout_s)
        self._fetch: FetchRequest | None = None  # what a caller waits for; set by its thread
        self._timeout = AdaptiveTimeout(config.timeout_s, out.sender.flow, self._snapshots.flow)
        self._closing = False
        self._token: bytes | None = None  # None while disconnected
        self._allowance_number = 0  # of the newest allowance
        self._data_open = self._data_greeted = False  # the learner has answered on the data socket; it was greeted
        self._hello_at: float | None = None
        self._key_exchange = KeyExchange(keys, host, port)
        self._retry_at = self._open_at = self._heard = self._ping_at = self._connected_at = 0.0
        self._connections = 0
        self._disconnected_at: float | None = time.monotonic()
        self._waited_s = 0.0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._waker = out.waker
        self._thread = threading.Thread(target=self._run, name="serl-chunk-link", daemon=True)

    @property
    def away(self) -> float:
        """Seconds since the connection was lost, or since the start; 0 while there is one."""
        return 0.0 if (since := self._disconnected_at) is None else time.monotonic() - since

    def close(self) -> None:
        """Stop with a goodbye. What is not acknowledged stays in the spool: call `flush` before."""
        self._closing = True
        self._waker.wake()
        if self._thread.ident is not None:
            self._thread.join()
        self._key_exchange.close()
        self._context.destroy(linger=_GOODBYE_MS)
        self._waker.close()
        self._out.close()

    def _run(self) -> None:
        try:
            while not self._closing:
                self._poll_once()
        except SerlChunkError as e:
            self._stop(e)
        except BaseException as e:
            self._stop(SerlChunkError(f"the connection's thread stopped: {type(e).__name__}: {e}"))
            raise
        else:
            if self._token is not None:
                self._send(handshake.BYE, token=self._token, retired_at=self._out.retire())

    def _stop(self, error: SerlChunkError) -> None:
        if self._connections:  # before a welcome, the caller that waits for it gets the error, and prints it
            log.error("%s", error)
        self.error = error
        self._disconnect("stopped")
        self._notify()

    def _send(self, kind: str, **fields: Any) -> bool:
        return try_send(self._sockets["control"], codec.encode(kind, fields))

    def _notify(self) -> None:
        with self.news:
            self.news.notify_all()

    def _poll_once(self) -> None:
        if not self._sockets and time.monotonic() >= self._open_at:
            self._sockets = {c: self._key_exchange.connect(self._context, self._config, c) for c in CHANNELS}
            self._hello_at = None
        poller = zmq.Poller()
        if (monitor := self._key_exchange.monitor) is not None:
            poller.register(monitor, zmq.POLLIN)
        for channel, s in self._sockets.items():
            writing = (channel == "control" and self._may_greet()) or (channel == "data" and self._out.sender.blocked)
            poller.register(s, zmq.POLLIN | (zmq.POLLOUT if writing else 0))
        poller.register(self._waker.fileno(), zmq.POLLIN)
        wait = 0.0 if self._out.can_pack else min(0.1, self._config.heartbeat / 2)
        ready = dict(poller.poll(round(1000 * wait)))
        if self._waker.fileno() in ready:
            self._waker.drain()
        # A list in both places: every socket is read, and a lost connection empties the table.
        changed = any([self._receive(c, s) for c, s in list(self._sockets.items()) if ready.get(s, 0) & zmq.POLLIN])
        self._out.pack()
        if monitor is not None and monitor in ready:
            self._check_keys()
        if not self._sockets:  # lost while receiving, or not open yet
            self._notify()
            return
        if self._token is None:
            self._greet()
        else:
            changed |= self._serve(self._token)
        if changed:
            self._notify()

    def _disconnect(self, why: str, retry_in: float = 0.0) -> None:
        """Drop the connection; the next turn opens another. What was in flight is sent again."""
        if self._token is not None:
            log.warning("connection to the learner at %s:%d lost: %s", self._host, self._port, why)
            self._disconnected_at = time.monotonic()
        self._token, self._allowance_number = None, 0
        if self.allowance is not None:  # what it has not used is given to others
            self.allowance = min(self.allowance, self._out.steps_recorded)
        self._retry_at = time.monotonic() + retry_in
        self._key_exchange.close()
        for s in self._sockets.values():
            s.close()
        self._sockets.clear()
        if self._fetch is not None:
            self._fetch.sent = False

    def _give_up(self, why: str) -> None:
        self._timeout.give_up()
        self._disconnect(why)

    def _check_keys(self) -> None:
        if (trouble := self._key_exchange.trouble(known=self._connections > 0)) is None:
            return
        if trouble.final:
            raise RefusedError(trouble.sentence)
        if trouble.sentence != self.waiting and self._connections:
            log.warning("%s", trouble.sentence)
        self.waiting = trouble.sentence
        self._disconnect(trouble.sentence)
        self._open_at = time.monotonic() + trouble.retry_in

    def _may_greet(self) -> bool:
        return self._token is None and self._hello_at is None and time.monotonic() >= self._retry_at

    def _greet(self) -> None:
        now = time.monotonic()
        if self._hello_at is not None:
            if now - self._hello_at > self._timeout.seconds:
                self.waiting = f"something listens at {self._host}:{self._port} but does not answer as a learner"
                self._give_up("no answer")
        elif self._may_greet() and self._send(handshake.WHO, protocol=handshake.PROTOCOL):
            self._hello_at = now

    def _on_identity(self, run: str) -> None:
        if run != self.run:
            if self.run:
                log.warning("another run: learner=%s:%d run=%s previous=%s", self._host, self._port, run, self.run)
            # In this order, and first: the session that acts for the previous run ends when it sees this.
            self.welcome, self.run = None, run
            self._out.attach(run)
        version = self._snapshots.version if run == self._snapshots.origin.run else -1
        hello = Hello(
            self._session, 1, self._actor_id, self._contract, run, version, 0, 0, 0, 0,
            demonstrations=self._demonstrations,
        )  # fmt: skip
        if (spool := self._out.spool) is not None:
            hello = hello._replace(
                session=spool.session, incarnation=spool.incarnation, first=spool.first, next=spool.next,
                steps_before_first=spool.steps_before_first, steps_before_next=spool.steps,
            )  # fmt: skip
        if not try_send(self._sockets["control"], hello.encode()):
            self._disconnect("no answer")

    def _on_welcome(self, message: Message) -> None:
        h = message.header
        welcome = Welcome(codec.field(h, "fields", dict), message.arrays, codec.text(h, "run"))
        self._out.connected(known=codec.field(h, "known", bool), seq=codec.count(h, "next"), arrived=_arrived(h))
        self._snapshots.connected(welcome.origin)
        now = time.monotonic()
        if self._disconnected_at is not None:
            self._waited_s += now - self._disconnected_at
        self._disconnected_at = None
        self._connections += 1
        self._token = codec.field(h, "token", bytes)
        self._heard = self._ping_at = self._connected_at = now
        self._timeout.begin()
        self._data_open = self._data_greeted = False
        self._on_status(h)
        self.welcome = welcome  # last: a thread that waits for it finds everything else up to date

    def _serve(self, token: bytes) -> bool:
        now = time.monotonic()
        if self._timeout.is_over(now - self._heard):
            self.waiting = f"the learner at {self._host}:{self._port} is silent"
            self._give_up("silent")
            return False
        if self._data_open:
            self._out.sender.pump(self._sockets["data"], token)
        else:
            self._greet_data(token)
        if self._timeout.is_over(now - self._out.sender.progress_at):
            self._give_up("it acknowledges nothing")  # the data connection alone broke, with what was in it
            return False
        if self._snapshots.flow.in_flight and self._timeout.is_over(now - self._snapshots.progress_at):
            self._give_up("no piece of a snapshot comes")  # likewise
            return False
        if now >= self._ping_at:
            idle = not (self._out.sender.in_flight_bytes or self._snapshots.flow.in_flight)
            if idle and self._timeout.is_over(now - self._connected_at):
                self._timeout.succeed()  # there is nothing to carry, and answers arrive
            self._ping_at = now + self._config.heartbeat
            self._data_greeted = False  # where the greeting was lost with its connection
            self._send(handshake.PING, token=token, timeout_s=self._timeout.seconds)
        fetch = self._fetch
        if fetch is not None and not fetch.sent and fetch.manifest is None:
            fetch.sent = self._send(handshake.FETCH, token=token, request=fetch.number, step=fetch.step)
        return not self._demonstrations and self._snapshots.pump(self._sockets["snapshots"], token)

    def _greet_data(self, token: bytes) -> None:
        if not self._data_greeted:  # it names the session: the learner buffers little of a connection without one
            self._data_greeted = try_send(self._sockets["data"], [token, *codec.encode(handshake.PING, {})])
        if self._out.flushed:  # nothing is late
            self._out.sender.wait()

    def _receive(self, channel: str, s: zmq.Socket[bytes]) -> bool:
        changed = False
        while not s.closed:
            if (frames := try_receive(s)) is None:
                break
            try:
                changed |= self._on_message(channel, codec.decode(frames, self._limits))
            except WireError as e:
                # The peer is no learner, or a broken one; a new connection is the only cure.
                log.warning("malformed message on %s: %s", channel, e)
                self.waiting = f"what answers at {self._host}:{self._port} is no learner ({e})"
                self._disconnect("malformed message", retry_in=self._config.heartbeat)
                break
        return changed

    def _on_message(self, channel: str, message: Message) -> bool:
        self._heard = time.monotonic()
        kind, h = message.kind, message.header
        if kind == handshake.REFUSED:
            self._on_refused(h)
        elif kind == handshake.IDENTITY:
            if self._token is None:
                self._on_identity(codec.text(h, "run", 128))
        elif kind == handshake.WELCOME:
            if self._token is None:
                self._on_welcome(message)
        elif self._token is None:
            return False  # of a connection that is being replaced
        elif channel == "snapshots":
            return self._snapshots.receive(message)
        elif kind == handshake.ACK:
            self._data_open = True
            self._take_allowance(h)
            gap, arrived = codec.field(h, "gap", bool), _arrived(h)
            self._out.sender.acknowledged(codec.count(h, "next"), gap=gap, arrived=arrived)
        elif kind == handshake.STATUS:
            self._on_status(h)
        elif kind == handshake.REJOIN:
            if h.get("token") == self._token:
                self._disconnect("the learner was restarted")
        elif kind in (handshake.FETCHED, handshake.FETCH_FAILED):
            self._on_fetched(message)
        else:
            raise WireError(f"unknown kind {kind!r}")
        return True

    def _on_refused(self, h: dict[str, Any]) -> None:
        reason = codec.shown(codec.text(h, "reason", 1 << 16))
        retry, renew = codec.field(h, "retry", bool), codec.field(h, "renew", bool)
        if renew and self._out.spool is not None:
            log.warning("%s", reason)
            self._out.renew()
        elif not retry:
            raise RefusedError(reason)
        self.waiting = reason
        self._disconnect("refused", retry_in=self._config.heartbeat)

    def _take_allowance(self, h: dict[str, Any]) -> None:
        allowance, number = codec.field(h, "allowance", (int, type(None))), codec.count(h, "allowance_number")
        if number > self._allowance_number:  # else a newer one came over the other socket
            self.allowance, self._allowance_number = allowance, number

    def _on_status(self, h: dict[str, Any]) -> None:
        self._take_allowance(h)
        finished = codec.field(h, "finished", (str, type(None)))
        self.finished = None if finished is None else codec.shown(finished)
        self.stalled = codec.shown(codec.text(h, "stalled"))
        if self.stalled:
            self._out.sender.wait()
        self._snapshots.set_available_version(codec.field(h, "version", int))
        self._out.sender.acknowledged(codec.count(h, "next"))

    def _on_fetched(self, message: Message) -> None:
        request = self._fetch
        if request is None or message.header.get("request") != request.number:
            return  # its caller gave up
        if message.kind == handshake.FETCH_FAILED:
            request.finish(FetchError(codec.shown(codec.text(message.header, "reason", 1 << 16))))
        else:
            request.manifest = Manifest.decode(message)
            self._snapshots.fetches.append(request)


def _arrived(h: dict[str, Any]) -> Arrived:
    partial = codec.field(h, "partial", (dict, type(None))) or {"first": 0, "received": 0}
    seq, nbytes = codec.count(h, "taken"), codec.count(partial, "received")
    return Arrived(seq, codec.count(partial, "first") if nbytes else -1, nbytes)

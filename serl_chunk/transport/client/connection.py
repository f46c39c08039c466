"""The network thread of an actor: one connection to a learner, reopened whenever it breaks."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import zmq

from serl_chunk.config.transport import TransportConfig
from serl_chunk.transport.client.flow import AdaptiveTimeout
from serl_chunk.transport.client.outbox import Arrived, Outbox
from serl_chunk.transport.client.snapshots import SnapshotClient
from serl_chunk.transport.security.client import ConnectionFault, KeyExchange
from serl_chunk.transport.security.keys import ClientKeys
from serl_chunk.transport.wire import handshake
from serl_chunk.transport.wire.handshake import CHANNELS, MAX_ARRAYS, Hello, RefusedError, Welcome, read_address
from serl_chunk.transport.wire.tickets import TicketRequest, decode_grant
from serl_chunk.types import ConfigError, Grant, SerlChunkError
from serl_chunk_robot.wire import codec
from serl_chunk_robot.wire.codec import Limits, Message, WireError
from serl_chunk_robot.wire.sockets import Waker, try_receive, try_send

log = logging.getLogger(__name__)

_LOOK_S = 1.0  # between looks for the address of a learner that is away
_GOODBYE_MS = 200  # how long `close` waits for its goodbye to leave


class Address(NamedTuple):
    """Where a learner is."""

    host: str
    port: int
    file: Path | None = None  # names the newest, for a learner that moves

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def newest(self) -> Address:
        found = None
        with contextlib.suppress(ConfigError):  # what others may write by now moves nothing
            found = None if self.file is None else read_address(self.file)
        return self if found is None else Address(*found, self.file)


class ClientSockets:
    """DEALER sockets of one attempt after another to reach a learner, by channel. For the network thread.

    `greet` introduces an attempt; no other is made before the time that `close` or `postpone` gave.
    """

    def __init__(self, config: TransportConfig, address: Address, keys: ClientKeys | None) -> None:
        self._config, self.address = config, address
        self._limits = Limits(config.max_message_bytes + codec.MAX_HEADER_BYTES, MAX_ARRAYS)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._exchange = KeyExchange(keys, address.host, address.port)
        self._sockets: dict[str, zmq.Socket[bytes]] = {}  # empty: not open
        self._greeted_at: float | None = None
        self._retry_at = self._open_at = 0.0  # when the next attempt may be greeted, and opened
        self._look_at = 0.0  # when the address is read next

    def __bool__(self) -> bool:
        return bool(self._sockets)

    def __getitem__(self, channel: str) -> zmq.Socket[bytes]:
        return self._sockets[channel]

    def open(self) -> None:
        """Open the sockets where none are and it is time."""
        if not self._sockets and time.monotonic() >= self._open_at:
            self._sockets = {c: self._exchange.connect(self._context, self._config, c) for c in CHANNELS}
            self._greeted_at = None

    def moved(self) -> bool:
        """Return whether the learner has another address now, for the next sockets. The file is read once a second."""
        if (now := time.monotonic()) < self._look_at:
            return False
        self._look_at, newest = now + _LOOK_S, self.address.newest()
        if newest == self.address:
            return False
        self.address = newest
        self._exchange.move(newest.host, newest.port)
        return True

    def poll(self, wait_s: float, waker: Waker, *, greets: bool, blocked: bool) -> tuple[list[str], bool]:
        """Wait for a message, a wake-up, or room: for a greeting, and for data where these are `blocked`.

        Returns the channels that have a message, and whether an exchange of keys has a result.
        """
        poller = zmq.Poller()
        if (monitor := self._exchange.monitor) is not None:
            poller.register(monitor, zmq.POLLIN)
        for channel, s in self._sockets.items():
            writing = (channel == "control" and greets and self._may_greet()) or (channel == "data" and blocked)
            poller.register(s, zmq.POLLIN | (zmq.POLLOUT if writing else 0))
        poller.register(waker.fileno(), zmq.POLLIN)
        ready = dict(poller.poll(round(1000 * wait_s)))
        if waker.fileno() in ready:
            waker.drain()
        channels = [c for c, s in self._sockets.items() if ready.get(s, 0) & zmq.POLLIN]
        return channels, monitor is not None and monitor in ready

    def messages(self, channel: str) -> Iterator[Message]:
        """What has arrived on a channel, until it is closed. Raises WireError."""
        while (s := self._sockets.get(channel)) is not None and (frames := try_receive(s)) is not None:
            yield codec.decode(frames, self._limits)

    def send(self, kind: str, **fields: Any) -> bool:
        return try_send(self._sockets["control"], codec.encode(kind, fields))

    def _may_greet(self) -> bool:
        return self._greeted_at is None and time.monotonic() >= self._retry_at

    def greet(self) -> float:
        """Ask who is there, once; return the seconds since then."""
        now = time.monotonic()
        if self._greeted_at is not None:
            return now - self._greeted_at
        if self._may_greet() and self.send(handshake.WHO, protocol=handshake.PROTOCOL):
            self._greeted_at = now
        return 0.0

    def fault(self, *, known: bool) -> ConnectionFault | None:
        """See `KeyExchange.trouble`."""
        return self._exchange.trouble(known=known)

    def close(self, retry_in: float = 0.0) -> None:
        """Close the sockets; the next ones are greeted in so many seconds."""
        self._retry_at = time.monotonic() + retry_in
        self._exchange.close()
        for s in self._sockets.values():
            s.close()
        self._sockets.clear()

    def postpone(self, seconds: float) -> None:
        """Open no sockets for so long."""
        self._open_at = time.monotonic() + seconds

    def destroy(self, linger_ms: int) -> None:
        self._exchange.close()
        self._context.destroy(linger=linger_ms)


class LearnerStatus:
    """What the learner said last, and how long and how often there was a connection. Any thread may read it."""

    def __init__(self) -> None:
        self.finished: str | None = None  # why training is over
        self.stalled = ""  # why the learner takes no records now
        self.busy = ""  # what takes it minutes, in which no more steps are allowed
        self.allowance: int | None = None  # steps the session may have recorded in all; None for no limit
        self.connections = 0
        self._allowance_number = 0  # of the newest allowance of this connection
        self._lost_at: float | None = time.monotonic()
        self._waited_s = 0.0

    @property
    def away(self) -> float:
        """Seconds since the connection was lost, or since the start; 0 while there is one."""
        return 0.0 if (since := self._lost_at) is None else time.monotonic() - since

    @property
    def waited_s(self) -> float:
        """Seconds without a connection in all."""
        return self._waited_s + self.away

    def _take_status(self, h: dict[str, Any]) -> None:
        self._take_allowance(h)
        finished = codec.field(h, "finished", (str, type(None)))
        self.finished = None if finished is None else codec.shown(finished)
        self.stalled, self.busy = (codec.shown(codec.text(h, name)) for name in ("stalled", "busy"))

    def _take_allowance(self, h: dict[str, Any]) -> None:
        allowance, number = codec.field(h, "allowance", (int, type(None))), codec.count(h, "allowance_number")
        if number > self._allowance_number:  # else a newer one came over the other socket
            self.allowance, self._allowance_number = allowance, number

    def _connected(self) -> None:
        self._waited_s, self._lost_at = self.waited_s, None
        self.connections += 1

    def _disconnected(self, steps_recorded: int) -> None:
        self._lost_at = time.monotonic() if self._lost_at is None else self._lost_at
        self._allowance_number = 0
        if self.allowance is not None:  # what it has not used is given to others
            self.allowance = min(self.allowance, steps_recorded)


class TicketClient:
    """A session's newest request for tickets and the learner's newest answer. The network thread sends and receives."""

    def __init__(self) -> None:
        self.grant: Grant | None = None  # None: no answer came yet
        self._request: TicketRequest | None = None
        self._sent: TicketRequest | None = None

    def request(self, held: Sequence[str], capacity: int) -> None:
        """Replace the request; see `LearnerLink.request_tickets`."""
        self._request = TicketRequest(-1, tuple(held), capacity)

    def repeat(self) -> None:
        """Send the request once more: it may be lost, and so may the answer."""
        self._sent = None

    def forget(self) -> None:
        """Drop request and answer, which another run knows nothing of."""
        self.grant = self._request = None

    def send_request(self, send: Callable[..., bool], token: bytes, version: int) -> None:
        """Send the request where it changed; `version`: newest snapshot that is complete here."""
        request = self._request
        if request is None or (request := request._replace(version=version)) == self._sent:
            return
        if send(handshake.TICKETS, token=token, **request._asdict()):
            self._sent = request


@dataclasses.dataclass
class _Live:
    """A connection from the learner's welcome until it is lost."""

    token: bytes
    data_open: bool = False  # the learner has answered on the data socket
    data_greeted: bool = False
    connected_at: float = dataclasses.field(default_factory=time.monotonic)
    heard_at: float = dataclasses.field(default_factory=time.monotonic)
    ping_at: float = 0.0


class Connection(LearnerStatus):
    """Three DEALER sockets and a thread, which sends what the outbox holds and pulls the newest snapshot.

    Attributes that other threads read are written whole; `news` is notified after each change.
    """

    def __init__(
        self, config: TransportConfig, address: Address, hello: Hello, out: Outbox, keys: ClientKeys | None
    ) -> None:
        """`hello`: what is the same for every learner and run, with a session for where no spool names one."""
        super().__init__()
        self.error: SerlChunkError | None = None  # why it is permanently disconnected
        self.welcome: Welcome | None = None  # of the newest connection; None until `run` has sent one
        self.run = ""  # id of the run that answers, whose spool the outbox has; changes before `welcome`
        self.waiting = f"no learner answers at {address}"  # why there is no welcome yet
        self.news = threading.Condition()
        self._config, self._hello = config, hello
        self._out, self._snapshots = out, SnapshotClient(config)
        self._timeout = AdaptiveTimeout(config.timeout_s, out.sender.flow, self._snapshots.flow)
        self._closing, self._tickets = False, TicketClient()
        self._live: _Live | None = None  # None while disconnected
        self._terms: dict[str, int] = {}  # highest that a learner of each run has said
        self._sockets = ClientSockets(config, address, keys)
        self._thread = threading.Thread(target=self._run, name="serl-chunk-link", daemon=True)

    @property
    def _address(self) -> Address:
        return self._sockets.address

    def close(self) -> None:
        """Stop with a goodbye. What is not acknowledged stays in the spool: call `flush` before."""
        self._closing = True
        self._out.waker.wake()
        if self._thread.ident is not None:
            self._thread.join()
        self._sockets.destroy(_GOODBYE_MS)
        self._out.waker.close()
        self._out.runs.close()

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
            if self._live is not None:
                self._sockets.send(handshake.BYE, token=self._live.token, retired_at=self._out.retire())

    def _stop(self, error: SerlChunkError) -> None:
        if self.connections:  # before a welcome, the caller that waits for it gets the error, and prints it
            log.error("%s", error)
        self.error = error
        self._disconnect("stopped")
        self._notify()

    def _notify(self) -> None:
        with self.news:
            self.news.notify_all()

    def _poll_once(self) -> None:
        if self._live is None and self._sockets.moved():
            log.info("the learner is at %s now", self._address)
            self.waiting = f"no learner answers at {self._address}"
            self._disconnect("it moved")
        self._sockets.open()
        wait = 0.0 if self._out.can_pack else min(0.1, self._config.heartbeat / 2)
        greets, blocked = self._live is None, self._out.sender.blocked
        channels, keys = self._sockets.poll(wait, self._out.waker, greets=greets, blocked=blocked)
        changed = any([self._receive(channel) for channel in channels])  # a list: each of them is read
        self._out.pack()
        if keys:
            self._check_keys()
        if not self._sockets:  # lost while receiving, or not open yet
            self._notify()
            return
        if self._live is None:
            if self._sockets.greet() > self._timeout.seconds:
                self.waiting = f"something listens at {self._address} but does not answer as a learner"
                self._give_up("no answer")
        else:
            changed |= self._serve(self._live)
        if changed:
            self._notify()

    def _disconnect(self, why: str, retry_in: float = 0.0) -> None:
        """Drop the connection; the next turn opens another. What was in flight is sent again."""
        if self._live is not None:
            log.warning("connection to the learner at %s lost: %s", self._address, why)
        self._live = None
        self._disconnected(self._out.steps_recorded)
        self._sockets.close(retry_in)
        self._snapshots.disconnected()

    def _give_up(self, why: str) -> None:
        self._timeout.give_up()
        self._disconnect(why)

    def _check_keys(self) -> None:
        known = self.connections > 0
        if (trouble := self._sockets.fault(known=known)) is None:
            return
        if trouble.final:
            raise RefusedError(trouble.sentence)
        if trouble.sentence != self.waiting and known:
            log.warning("%s", trouble.sentence)
        self.waiting = trouble.sentence
        self._disconnect(trouble.sentence)
        self._sockets.postpone(trouble.retry_in)

    def _on_identity(self, run: str) -> None:
        if run != self.run:
            if self.run:
                log.warning("another run: learner=%s run=%s previous=%s", self._address, run, self.run)
            self._tickets.forget()
            # In this order, and first: the session that acts for the previous run ends when it sees this.
            self.welcome, self.run = None, run
            self._out.attach(run)
        hello = self._hello._replace(run=run, version=self._version)
        if (spool := self._out.spool) is not None:
            hello = hello._replace(
                session=spool.session, incarnation=spool.incarnation, first=spool.first, next=spool.next,
                steps_before_first=spool.steps_before_first, steps_before_next=spool.steps,
            )  # fmt: skip
        if not try_send(self._sockets["control"], hello.encode()):
            self._disconnect("no answer")

    @property
    def _version(self) -> int:
        """Newest snapshot of this run that is complete here, -1 for none."""
        return self._snapshots.version if self.run == self._snapshots.origin.run else -1

    def _is_older(self, h: dict[str, Any]) -> bool:
        """Leave a learner whose run another one has taken over since; False where it is the newest known."""
        term = codec.count(h, "term")
        if term < self._terms.get(self.run, 0):
            self.waiting = (
                f"an older learner of run {self.run} answers at {self._address} (term {term}, the newest had "
                f"{self._terms[self.run]}): stop it"
            )
            log.warning("%s; where the run came out of a backup, restart this actor", self.waiting)
            self._disconnect("an older learner answers", retry_in=self._config.heartbeat)
            return True
        self._terms[self.run] = term
        return False

    def _on_welcome(self, message: Message) -> None:
        h = message.header
        if self._is_older(h):
            return
        welcome = Welcome(codec.field(h, "fields", dict), message.arrays, codec.text(h, "run"))
        self._out.connected(known=codec.field(h, "known", bool), seq=codec.count(h, "next"), arrived=_arrived(h))
        self._snapshots.connected(welcome.origin)
        self._connected()
        self._timeout.begin()
        self._live = _Live(codec.field(h, "token", bytes))
        self._on_status(h)
        self.welcome = welcome  # last: a thread that waits for it finds everything else up to date

    def _serve(self, live: _Live) -> bool:
        now = time.monotonic()
        if self._timeout.is_over(now - live.heard_at):
            self.waiting = f"the learner at {self._address} is silent"
            self._give_up("silent")
            return False
        if why := self._send_records(live, now):
            self._give_up(why)
            return False
        self._ping(live, now)
        self._tickets.send_request(self._sockets.send, live.token, self._version)
        self._snapshots.send_request(self._sockets.send, live.token)
        return not self._hello.demonstrations and self._snapshots.pump(self._sockets["snapshots"], live.token)

    def _send_records(self, live: _Live, now: float) -> str:
        """Return why the connection is no good; empty where it is."""
        sender, snapshots = self._out.sender, self._snapshots
        if live.data_open:
            sender.pump(self._sockets["data"], live.token)
        elif not live.data_greeted:  # it names the session: the learner buffers little of a connection without one
            frames = [live.token, *codec.encode(handshake.PING, {})]
            live.data_greeted = try_send(self._sockets["data"], frames)
        if not live.data_open and self._out.flushed:  # nothing is late
            sender.wait()
        if self._timeout.is_over(now - sender.progress_at):
            return "it acknowledges nothing"  # the data connection alone broke, with what was in it
        if snapshots.flow.in_flight and self._timeout.is_over(now - snapshots.progress_at):
            return "no piece of a snapshot comes"  # likewise
        return ""

    def _ping(self, live: _Live, now: float) -> None:
        """Send a heartbeat where one is due."""
        if now < live.ping_at:
            return
        idle = not (self._out.sender.in_flight_bytes or self._snapshots.flow.in_flight)
        if idle and self._timeout.is_over(now - live.connected_at):
            self._timeout.succeed()  # there is nothing to carry, and answers arrive
        live.ping_at = now + self._config.heartbeat
        self._tickets.repeat()
        live.data_greeted = False  # where the greeting was lost with its connection
        timeout_s, unacknowledged = self._timeout.seconds, self._out.unacknowledged
        self._sockets.send(handshake.PING, token=live.token, timeout_s=timeout_s, unacknowledged=unacknowledged)

    def _receive(self, channel: str) -> bool:
        changed = False
        try:
            for message in self._sockets.messages(channel):
                changed |= self._on_message(channel, message)
        except WireError as e:
            # The peer is no learner, or a broken one; a new connection is the only cure.
            log.warning("malformed message on %s: %s", channel, e)
            self.waiting = f"what answers at {self._address} is no learner ({e})"
            self._disconnect("malformed message", retry_in=self._config.heartbeat)
        return changed

    def _on_message(self, channel: str, message: Message) -> bool:
        kind, h, live = message.kind, message.header, self._live
        if live is not None:
            live.heard_at = time.monotonic()
        if kind == handshake.REFUSED:
            self._on_refused(h)
        elif kind == handshake.IDENTITY:
            if live is None:
                self._on_identity(codec.text(h, "run", 128))
        elif kind == handshake.WELCOME:
            if live is None:
                self._on_welcome(message)
        elif live is None:
            return False  # of a connection that is being replaced
        elif channel == "snapshots":
            return self._snapshots.receive(message)
        elif kind == handshake.ACK:
            live.data_open = True
            self._take_allowance(h)
            gap, arrived = codec.field(h, "gap", bool), _arrived(h)
            self._out.sender.acknowledged(codec.count(h, "next"), gap=gap, arrived=arrived)
        elif kind == handshake.STATUS:
            self._on_status(h)
        elif kind == handshake.REJOIN:
            if h.get("token") == live.token:
                self._disconnect("the learner was restarted")
        elif kind == handshake.GRANT:
            self._tickets.grant = decode_grant(message)
        elif kind in (handshake.FETCHED, handshake.FETCH_FAILED):
            self._snapshots.receive_checkpoint(message)
        else:
            raise WireError(f"unknown kind {kind!r}")
        return True

    def _on_refused(self, h: dict[str, Any]) -> None:
        reason = codec.shown(codec.text(h, "reason", 1 << 16))
        retry, renew = codec.field(h, "retry", bool), codec.field(h, "renew", bool)
        if renew and self._out.spool is not None:
            log.warning("%s", reason)
            self._out.runs.renew()
        elif not retry:
            raise RefusedError(reason)
        self.waiting = reason
        self._disconnect("refused", retry_in=self._config.heartbeat)

    def _on_status(self, h: dict[str, Any]) -> None:
        if self._is_older(h):
            return
        self._take_status(h)
        if self.stalled:
            self._out.sender.wait()
        self._snapshots.set_available_version(codec.field(h, "version", int))
        self._out.sender.acknowledged(codec.count(h, "next"))


def _arrived(h: dict[str, Any]) -> Arrived:
    partial = codec.field(h, "partial", (dict, type(None))) or {"first": 0, "received": 0}
    seq, nbytes = codec.count(h, "taken"), codec.count(partial, "received")
    return Arrived(seq, codec.count(partial, "first") if nbytes else -1, nbytes)

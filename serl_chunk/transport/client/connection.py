"""The network thread of an actor: one connection to a learner, reopened whenever it breaks."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from serl_chunk.config.transport import TransportConfig
from serl_chunk.transport.client.client_sockets import Address, ClientSockets
from serl_chunk.transport.client.flow import AdaptiveTimeout
from serl_chunk.transport.client.live import Introduction, LearnerStatus, LiveConnection, Presence
from serl_chunk.transport.client.outbox import Outbox
from serl_chunk.transport.client.sender import Arrived
from serl_chunk.transport.client.snapshots import CheckpointFetches, SnapshotClient
from serl_chunk.transport.security.keys import ClientKeys
from serl_chunk.transport.wire import handshake
from serl_chunk.transport.wire.handshake import RefusedError, Welcome
from serl_chunk.types import SerlChunkError
from serl_chunk_robot.wire import codec
from serl_chunk_robot.wire.codec import Message, WireError
from serl_chunk_robot.wire.sockets import try_send

log = logging.getLogger(__name__)

_GOODBYE_MS = 200  # how long `close` waits for its goodbye to leave


class Connection:
    """Three DEALER sockets and a thread, which sends what the outbox holds and pulls the newest snapshot.

    Attributes that other threads read are written whole; `news` is notified after each change.
    """

    def __init__(
        self, config: TransportConfig, address: Address, introduction: Introduction, out: Outbox,
        keys: ClientKeys | None,
    ) -> None:  # fmt: skip
        self.error: SerlChunkError | None = None  # why it is permanently disconnected
        self.welcome: Welcome | None = None  # of the newest connection; None until `run` has sent one
        self.run = ""  # id of the run that answers, whose spool the outbox has; changes before `welcome`
        self.waiting = f"no learner answers at {address}"  # why there is no welcome yet
        self.news = threading.Condition()
        self._status, self._presence = LearnerStatus(), Presence()
        self._config, self._address, self._introduction = config, address, introduction
        self._out, self._snapshots = out, SnapshotClient(config.piece_bytes, config.timeout_s)
        self._fetches = CheckpointFetches(self._snapshots)
        self._timeout = AdaptiveTimeout(config.timeout_s, out.sender.flow, self._snapshots.flow)
        self._closing = False
        self._live: LiveConnection | None = None  # None while disconnected
        self._sockets = ClientSockets(config, address, keys)
        self._thread = threading.Thread(target=self._run, name="serl-chunk-link", daemon=True)

    @property
    def finished(self) -> str | None:
        """Why training is over."""
        return self._status.finished

    @property
    def stalled(self) -> str:
        """Why the learner takes no records now."""
        return self._status.stalled

    @property
    def allowance(self) -> int | None:
        """Steps the session may have recorded in all; None for no limit."""
        return self._status.allowance

    @property
    def away(self) -> float:
        """Seconds since the connection was lost, or since the start; 0 while there is one."""
        return self._presence.away

    def close(self) -> None:
        """Stop with a goodbye. What is not acknowledged stays in the spool: call `flush` before."""
        self._closing = True
        self._out.waker.wake()
        if self._thread.ident is not None:
            self._thread.join()
        self._sockets.destroy(_GOODBYE_MS)
        self._out.waker.close()
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
            if self._live is not None:
                self._sockets.send(handshake.BYE, token=self._live.token, retired_at=self._out.retire())

    def _stop(self, error: SerlChunkError) -> None:
        if self._presence.connections:  # before a welcome, the caller that waits for it gets the error, and prints it
            log.error("%s", error)
        self.error = error
        self._disconnect("stopped")
        self._notify()

    def _notify(self) -> None:
        with self.news:
            self.news.notify_all()

    def _poll_once(self) -> None:
        self._sockets.open()
        wait = 0.0 if self._out.can_pack else min(0.1, self._config.heartbeat / 2)
        greets, blocked = self._live is None, self._out.sender.blocked
        ready = self._sockets.poll(wait, self._out.waker, greets=greets, blocked=blocked)
        changed = any([self._receive(channel) for channel in ready.channels])  # a list: each of them is read
        self._out.pack()
        if ready.keys:
            self._check_keys()
        if not self._sockets:  # lost while receiving, or not open yet
            self._notify()
            return
        if self._live is None:
            self._greet()
        else:
            changed |= self._serve(self._live)
        if changed:
            self._notify()

    def _disconnect(self, why: str, retry_in: float = 0.0) -> None:
        """Drop the connection; the next turn opens another. What was in flight is sent again."""
        if self._live is not None:
            log.warning("connection to the learner at %s lost: %s", self._address, why)
            self._presence.lost()
        self._live = None
        self._status.disconnected(self._out.steps_recorded)
        self._sockets.close(retry_in)
        self._fetches.disconnected()

    def _give_up(self, why: str) -> None:
        self._timeout.give_up()
        self._disconnect(why)

    def _check_keys(self) -> None:
        known = self._presence.connections > 0
        if (trouble := self._sockets.fault(known=known)) is None:
            return
        if trouble.final:
            raise RefusedError(trouble.sentence)
        if trouble.sentence != self.waiting and known:
            log.warning("%s", trouble.sentence)
        self.waiting = trouble.sentence
        self._disconnect(trouble.sentence)
        self._sockets.postpone(trouble.retry_in)

    def _greet(self) -> None:
        if self._sockets.greet() > self._timeout.seconds:
            self.waiting = f"something listens at {self._address} but does not answer as a learner"
            self._give_up("no answer")

    def _on_identity(self, run: str) -> None:
        if run != self.run:
            if self.run:
                log.warning("another run: learner=%s run=%s previous=%s", self._address, run, self.run)
            # In this order, and first: the session that acts for the previous run ends when it sees this.
            self.welcome, self.run = None, run
            self._out.attach(run)
        version = self._snapshots.version if run == self._snapshots.origin.run else -1
        hello = self._introduction.hello(run, version, self._out.spool)
        if not try_send(self._sockets["control"], hello.encode()):
            self._disconnect("no answer")

    def _on_welcome(self, message: Message) -> None:
        h = message.header
        welcome = Welcome(codec.field(h, "fields", dict), message.arrays, codec.text(h, "run"))
        self._out.connected(known=codec.field(h, "known", bool), seq=codec.count(h, "next"), arrived=_arrived(h))
        self._snapshots.connected(welcome.origin)
        self._presence.connected()
        self._live = LiveConnection(
            codec.field(h, "token", bytes), self._sockets, self._out, self._snapshots, self._timeout,
            self._config.heartbeat,
        )  # fmt: skip
        self._on_status(h)
        self.welcome = welcome  # last: a thread that waits for it finds everything else up to date

    def _serve(self, live: LiveConnection) -> bool:
        now = time.monotonic()
        if live.is_silent(now):
            self.waiting = f"the learner at {self._address} is silent"
            self._give_up("silent")
            return False
        if why := live.send_records(now):
            self._give_up(why)
            return False
        live.ping(now)
        self._fetches.send(self._sockets.send, live.token)
        return not self._introduction.demonstrations and self._snapshots.pump(self._sockets["snapshots"], live.token)

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
            live.hear()
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
            self._status.take_allowance(h)
            gap, arrived = codec.field(h, "gap", bool), _arrived(h)
            self._out.sender.acknowledged(codec.count(h, "next"), gap=gap, arrived=arrived)
        elif kind == handshake.STATUS:
            self._on_status(h)
        elif kind == handshake.REJOIN:
            if h.get("token") == live.token:
                self._disconnect("the learner was restarted")
        elif kind in (handshake.FETCHED, handshake.FETCH_FAILED):
            self._fetches.receive(message)
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
        self._status.take(h)
        if self._status.stalled:
            self._out.sender.wait()
        self._snapshots.set_available_version(codec.field(h, "version", int))
        self._out.sender.acknowledged(codec.count(h, "next"))


def _arrived(h: dict[str, Any]) -> Arrived:
    partial = codec.field(h, "partial", (dict, type(None))) or {"first": 0, "received": 0}
    seq, nbytes = codec.count(h, "taken"), codec.count(partial, "received")
    return Arrived(seq, codec.count(partial, "first") if nbytes else -1, nbytes)

"""What a connection to a learner knows: how to introduce itself, what the learner said, and whether it is there."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any

from serl_chunk.transport.client.client_sockets import ClientSockets
from serl_chunk.transport.client.flow import AdaptiveTimeout
from serl_chunk.transport.client.outbox import Outbox
from serl_chunk.transport.client.snapshots import SnapshotClient
from serl_chunk.transport.storage.spool import Spool
from serl_chunk.transport.wire import handshake
from serl_chunk.transport.wire.handshake import Hello
from serl_chunk_robot.wire import codec
from serl_chunk_robot.wire.sockets import try_send


class Introduction:
    """The part of a hello that is the same for every learner."""

    def __init__(self, actor_id: str, contract: Mapping[str, str], *, demonstrations: bool) -> None:
        self.demonstrations = demonstrations
        self._actor_id, self._contract = actor_id, dict(contract)
        self._session = uuid.uuid4().hex  # where no spool names one

    def hello(self, run: str, version: int, spool: Spool | None) -> Hello:
        """Return the hello to a learner of `run`; `version`: the newest snapshot of it that is here, or -1."""
        hello = Hello(
            self._session, 1, self._actor_id, self._contract, run, version, 0, 0, 0, 0,
            demonstrations=self.demonstrations,
        )  # fmt: skip
        if spool is None:
            return hello
        return hello._replace(
            session=spool.session, incarnation=spool.incarnation, first=spool.first, next=spool.next,
            steps_before_first=spool.steps_before_first, steps_before_next=spool.steps,
        )  # fmt: skip


class LearnerStatus:
    """What the learner said last. Any thread may read it."""

    def __init__(self) -> None:
        self.finished: str | None = None  # why training is over
        self.stalled = ""  # why the learner takes no records now
        self.allowance: int | None = None  # steps the session may have recorded in all; None for no limit
        self._number = 0  # of the newest allowance of this connection

    def take(self, h: dict[str, Any]) -> None:
        """Raises WireError."""
        self.take_allowance(h)
        finished = codec.field(h, "finished", (str, type(None)))
        self.finished = None if finished is None else codec.shown(finished)
        self.stalled = codec.shown(codec.text(h, "stalled"))

    def take_allowance(self, h: dict[str, Any]) -> None:
        allowance, number = codec.field(h, "allowance", (int, type(None))), codec.count(h, "allowance_number")
        if number > self._number:  # else a newer one came over the other socket
            self.allowance, self._number = allowance, number

    def disconnected(self, steps_recorded: int) -> None:
        self._number = 0
        if self.allowance is not None:  # what it has not used is given to others
            self.allowance = min(self.allowance, steps_recorded)


class Presence:
    """How long, and how often, there was a connection."""

    def __init__(self) -> None:
        self.connections = 0
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

    def connected(self) -> None:
        if self._lost_at is not None:
            self._waited_s += time.monotonic() - self._lost_at
        self._lost_at = None
        self.connections += 1

    def lost(self) -> None:
        self._lost_at = time.monotonic()


class LiveConnection:
    """A connection from the learner's welcome until it is lost: what is sent on it, and the signs that it works."""

    def __init__(
        self, token: bytes, sockets: ClientSockets, out: Outbox, snapshots: SnapshotClient, timeout: AdaptiveTimeout,
        heartbeat_s: float,
    ) -> None:  # fmt: skip
        self.token = token
        self.data_open = False  # the learner has answered on the data socket
        self._data_greeted = False
        self._sockets, self._out, self._snapshots = sockets, out, snapshots
        self._timeout, self._heartbeat_s = timeout, heartbeat_s
        self._heard = self._ping_at = self._connected_at = time.monotonic()
        timeout.begin()

    def hear(self) -> None:
        self._heard = time.monotonic()

    def is_silent(self, now: float) -> bool:
        return self._timeout.is_over(now - self._heard)

    def send_records(self, now: float) -> str:
        """Return why the connection is no good; empty where it is."""
        sender, flow = self._out.sender, self._snapshots.flow
        if self.data_open:
            sender.pump(self._sockets["data"], self.token)
        else:
            self._greet_data()
        if self._timeout.is_over(now - sender.progress_at):
            return "it acknowledges nothing"  # the data connection alone broke, with what was in it
        if flow.in_flight and self._timeout.is_over(now - self._snapshots.progress_at):
            return "no piece of a snapshot comes"  # likewise
        return ""

    def _greet_data(self) -> None:
        if not self._data_greeted:  # it names the session: the learner buffers little of a connection without one
            frames = [self.token, *codec.encode(handshake.PING, {})]
            self._data_greeted = try_send(self._sockets["data"], frames)
        if self._out.flushed:  # nothing is late
            self._out.sender.wait()

    def ping(self, now: float) -> None:
        """Send a heartbeat where one is due."""
        if now < self._ping_at:
            return
        idle = not (self._out.sender.in_flight_bytes or self._snapshots.flow.in_flight)
        if idle and self._timeout.is_over(now - self._connected_at):
            self._timeout.succeed()  # there is nothing to carry, and answers arrive
        self._ping_at = now + self._heartbeat_s
        self._data_greeted = False  # where the greeting was lost with its connection
        self._sockets.send(handshake.PING, token=self.token, timeout_s=self._timeout.seconds)

"""An actor's three sockets to a learner: opened, greeted once, and closed where the connection is lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import zmq

from serl_chunk.config.transport import TransportConfig
from serl_chunk.transport.security.client import ConnectionFault, KeyExchange
from serl_chunk.transport.security.keys import ClientKeys
from serl_chunk.transport.sockets import CHANNELS
from serl_chunk.transport.wire import handshake
from serl_chunk_robot.wire import codec
from serl_chunk_robot.wire.codec import Limits, Message
from serl_chunk_robot.wire.sockets import Waker, try_receive, try_send


class Address(NamedTuple):
    """Where a learner is."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Ready(NamedTuple):
    """What a poll found."""

    channels: tuple[str, ...]  # that have a message
    keys: bool  # an exchange of keys has a result


class ClientSockets:
    """DEALER sockets of one attempt after another to reach a learner, by channel. For the network thread.

    `greet` introduces an attempt; no other is made before the time that `close` or `postpone` gave.
    """

    def __init__(self, config: TransportConfig, address: Address, keys: ClientKeys | None) -> None:
        self._config = config
        self._limits = Limits(config.max_message_bytes + codec.MAX_HEADER_BYTES, config.max_arrays)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._exchange = KeyExchange(keys, address.host, address.port)
        self._sockets: dict[str, zmq.Socket[bytes]] = {}  # empty: not open
        self._greeted_at: float | None = None
        self._retry_at = self._open_at = 0.0  # when the next attempt may be greeted, and opened

    def __bool__(self) -> bool:
        return bool(self._sockets)

    def __getitem__(self, channel: str) -> zmq.Socket[bytes]:
        return self._sockets[channel]

    def open(self) -> None:
        """Open the sockets where none are and it is time."""
        if not self._sockets and time.monotonic() >= self._open_at:
            self._sockets = {c: self._exchange.connect(self._context, self._config, c) for c in CHANNELS}
            self._greeted_at = None

    def poll(self, wait_s: float, waker: Waker, *, greets: bool, blocked: bool) -> Ready:
        """Wait for a message, a wake-up, or room: for a greeting, and for data where these are `blocked`."""
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
        channels = tuple(c for c, s in self._sockets.items() if ready.get(s, 0) & zmq.POLLIN)
        return Ready(channels, monitor is not None and monitor in ready)

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

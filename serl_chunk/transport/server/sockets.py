"""The learner's three ROUTER sockets, and the limit on malformed messages of a peer."""

from __future__ import annotations

import collections
import errno
import logging
import threading
import time
from typing import Any

import zmq

from serl_chunk.config.transport import TransportConfig
from serl_chunk.transport import sockets
from serl_chunk.transport.security.client import Outcome
from serl_chunk.transport.security.server import Authenticator, ServerKeys
from serl_chunk.transport.server.connection_guard import ConnectionGuard
from serl_chunk.transport.sockets import CHANNELS, Clock, Counters, Waker, endpoint, try_receive, try_send
from serl_chunk.transport.wire.codec import MAX_HEADER_BYTES, Frame, shown
from serl_chunk.transport.wire.parts import MAX_PART_BYTES
from serl_chunk.types import ConfigError

logger = logging.getLogger(__name__)

FORGIVEN_PER_S = 1.0  # malformed messages of a connection that are forgotten again in a second
_MAX_TRACKED_PEERS = 1024  # connections; the one blamed least recently makes room


class PeerRateLimiter:
    """Counts malformed messages by connection, and forgets them with time. Used by one thread.

    A peer is a connection: an honest actor may share an attacker's address, behind a tunnel for instance. A message
    that is dropped unread does not count, so that a flood costs one decoding a second.
    """

    def __init__(self, limit: int, clock: Clock = time.monotonic) -> None:
        """`limit`: malformed messages that a connection may send at once."""
        self._limit, self._clock = limit, clock
        self._levels: collections.OrderedDict[tuple[str, bytes], tuple[float, float]] = collections.OrderedDict()

    def record_error(self, channel: str, identity: bytes) -> bool:
        """Count a malformed message; True where the connection's messages are dropped from now on."""
        key, now = (channel, identity), self._clock()
        level = self._level(key, now) + 1
        self._levels[key] = level, now
        self._levels.move_to_end(key)
        if len(self._levels) > _MAX_TRACKED_PEERS:
            self._levels.popitem(last=False)
        return level >= self._limit

    def is_blocked(self, channel: str, identity: bytes) -> bool:
        """Whether messages of this connection are to be dropped unread."""
        key = (channel, identity)
        if key not in self._levels:
            return False
        level = self._level(key, self._clock())
        if level <= 0:
            del self._levels[key]
        return level >= self._limit

    def _level(self, key: tuple[str, bytes], now: float) -> float:
        level, at = self._levels.get(key, (0.0, now))
        return max(0.0, level - FORGIVEN_PER_S * (now - at))


# Bytes of a frame: large records travel in parts, what comes on the others is small (a doctor's echo is 1 MiB).
_MAX_FRAME_BYTES = {"data": MAX_PART_BYTES, "snapshots": 1 << 16, "control": 2 << 20}
_FAILED_HANDSHAKES = {
    Outcome.FOREIGN: "a key exchange for another learner, or none at all: its own output has the reason",
    Outcome.MISMATCH: "a connection without a key: an actor's own output has the remedy",
    Outcome.CLOSED: "a connection that ended before it named a key: a port scan, or an actor without a key",
}
_REMEMBERED = 256  # complaints that are not logged again
_LINES = 30  # complaints logged in a minute; more are only counted


class ServerSockets:
    """Sockets bound to `port` (data) and the two after it (snapshots, control).

    The data socket belongs to the data thread; the others, libzmq's requests about keys and the monitors to the control
    thread. What cannot be sent or understood is counted, and logged once per peer and kind: neither raises.
    """

    def __init__(
        self,
        config: TransportConfig,
        bind: str,
        port: int,
        data_counters: Counters,
        control_counters: Counters,
        keys: ServerKeys | None = None,
    ) -> None:
        """Each of the counters is written by one thread. Raises ConfigError for a port in use or a foreign address."""
        self._counters = {c: data_counters if c == "data" else control_counters for c in CHANNELS}
        self._complaints: collections.OrderedDict[tuple[str, str, str], None] = collections.OrderedDict()
        self._lines: collections.deque[float] = collections.deque(maxlen=_LINES)  # when the last ones were logged
        self._complaining = threading.Lock()  # of the two above
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._data_poller, self._poller = zmq.Poller(), zmq.Poller()
        self.authenticator: Authenticator | None = None
        largest = MAX_PART_BYTES + MAX_HEADER_BYTES
        self.guard = ConnectionGuard(max(config.credit_bytes, largest), largest, self._on_cut)
        if keys is not None:
            self.authenticator = Authenticator(self._context, keys, control_counters, self.complain, port)
            self._poller.register(self.authenticator.socket, zmq.POLLIN)
        for offset, channel in enumerate(CHANNELS):
            s = self._sockets[channel] = sockets.make_socket(
                self._context, zmq.ROUTER, config, _MAX_FRAME_BYTES[channel]
            )
            if self.authenticator is not None:
                self.authenticator.secure(s)
            self.guard.watch(channel, s, port + offset)
            self._poller.register(self.guard.monitors[channel], zmq.POLLIN)
            try:
                s.bind(endpoint("127.0.0.1" if bind == "localhost" else bind, port + offset))
            except zmq.ZMQError as e:
                self.close()
                if e.errno == errno.EADDRINUSE:
                    raise ConfigError(
                        f"port {port + offset} of {bind} is in use: another learner may be running there. Stop it, or "
                        f"choose another port for learner and actors (three are used: {port}, {port + 1}, {port + 2})",
                        parameter="port",
                    ) from e
                message = f"cannot listen on {bind} port {port + offset}: {e.strerror}"
                raise ConfigError(message, parameter="bind") from e
            (self._data_poller if channel == "data" else self._poller).register(s, zmq.POLLIN)

    def wait_data(self, waker: Waker, seconds: float) -> bool:
        """Wait for a data message, for `waker` or for `seconds`; True where there is a message."""
        ready = _poll(self._data_poller, waker, seconds)
        self.guard.drained += self._sockets["data"] not in ready
        return self._sockets["data"] in ready

    def wait_control(self, waker: Waker, seconds: float) -> set[str]:
        """Wait for the other channels, for `waker` or for `seconds`; returns the channels with messages."""
        ready = _poll(self._poller, waker, min(seconds, max(0.0, self.guard.look_at - time.monotonic())))
        if self.authenticator is not None and self.authenticator.socket in ready:
            self.authenticator.serve()
        for channel, monitor in self.guard.monitors.items():
            if monitor in ready:
                outcomes = self.guard.read(channel)
                if self.authenticator is not None and channel == "control":
                    self._note_failures(outcomes)
        return {channel for channel, s in self._sockets.items() if s in ready and channel != "data"}

    def _note_failures(self, outcomes: list[Outcome]) -> None:
        """Count handshakes that ended before a key was named; libzmq does not report whose."""
        for outcome in outcomes:
            if outcome in _FAILED_HANDSHAKES:
                self._counters["control"]["handshakes_failed"] += 1
                self.complain("control", "an unknown peer", _FAILED_HANDSHAKES[outcome])

    def receive(self, channel: str) -> list[zmq.Frame] | None:
        """Return the next message, its sender's identity first; None where there is none."""
        frames = try_receive(self._sockets[channel])
        if frames is not None:
            self.guard.count(channel, frames)
        elif channel == "data":
            self.guard.drained += 1
        return frames

    def _on_cut(self, channel: str, why: str) -> None:
        self._counters["control"]["connections_cut"] += 1
        self.complain(channel, "some peer", why)

    def send(self, channel: str, identity: bytes, frames: list[Frame]) -> bool:
        """Send to one peer; one that is gone or does not read is counted. Every answer is repeatable."""
        sent = bool(identity) and try_send(self._sockets[channel], [identity, *frames])
        self._counters[channel]["replies_dropped"] += not sent
        return sent

    def complain(self, channel: str, peer: str, what: str) -> None:
        """Log once per channel, peer and kind of trouble (`what` up to its first colon). For any thread."""
        key, now = (channel, peer, what.split(":")[0]), time.monotonic()
        with self._complaining:
            if key in self._complaints:
                self._complaints.move_to_end(key)
                return
            self._complaints[key] = None
            if len(self._complaints) > _REMEMBERED:
                self._complaints.popitem(last=False)
            logged = len(self._lines) < _LINES or now - self._lines[0] > 60.0
            if logged:
                self._lines.append(now)
        if logged:
            logger.warning("%s message from %s: %s (logged once, counted always)", channel, peer, shown(what))

    def close(self) -> None:
        """Release the ports and drop what was not sent."""
        self.guard.close()
        self._context.destroy(linger=0)


def _poll(poller: zmq.Poller, waker: Waker, seconds: float) -> dict[Any, int]:
    poller.register(waker.fileno(), zmq.POLLIN)
    ready = dict(poller.poll(round(1000 * seconds)))
    if waker.fileno() in ready:
        waker.drain()
    return ready


def address_of(frames: list[Any]) -> str:
    """Return the network address of a received message."""
    try:
        return str(frames[-1].get("Peer-Address")).removeprefix("::ffff:") if frames else "unknown"
    except zmq.ZMQError:  # a transport without addresses
        return "unknown"


def plain_bytes(frame: Frame) -> bytes:
    """A small frame's content."""
    return frame.bytes if isinstance(frame, zmq.Frame) else bytes(frame)

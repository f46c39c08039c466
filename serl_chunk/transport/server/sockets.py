"""The learner's three ROUTER sockets, and limits on what peers send."""

from __future__ import annotations

import collections
import errno
import itertools
import logging
import threading
import time
from collections.abc import Callable, Hashable
from typing import Any

import zmq

from serl_chunk.config.transport import TransportConfig
from serl_chunk.io import allow_open_files
from serl_chunk.transport.security.client import HANDSHAKE_EVENTS, Outcome, outcome_of
from serl_chunk.transport.security.server import Authenticator, ServerKeys
from serl_chunk.transport.wire.handshake import CHANNELS, CREDIT_BYTES, MAX_ARRAYS, Clock, Counters
from serl_chunk.transport.wire.records import MAX_PART_BYTES
from serl_chunk.types import ConfigError
from serl_chunk_robot.wire import sockets
from serl_chunk_robot.wire.codec import MAX_HEADER_BYTES, Frame, Limits, WireError, shown
from serl_chunk_robot.wire.connection_guard import ChannelLimits, ConnectionGuard
from serl_chunk_robot.wire.sockets import Waker, endpoint, try_receive, try_send

logger = logging.getLogger(__name__)

MAX_MALFORMED = 32  # messages of a connection that are read ...
FORGIVEN_PER_S = 1.0  # ... and so many more a second
_MAX_TRACKED = 1024  # keys of a RateLimiter; the one counted least recently makes room


class RateLimiter:
    """Counts events by key, and forgets `per_s` of each in a second. Used by one thread."""

    def __init__(self, limit: int, per_s: float, clock: Clock = time.monotonic) -> None:
        self._limit, self._per_s, self._clock = limit, per_s, clock
        self._levels: collections.OrderedDict[Hashable, tuple[float, float]] = collections.OrderedDict()

    def add(self, key: Hashable) -> bool:
        """Count an event; True where the limit is reached."""
        level, now = self._level(key) + 1, self._clock()
        self._levels[key] = level, now
        self._levels.move_to_end(key)
        if len(self._levels) > _MAX_TRACKED:
            self._levels.popitem(last=False)
        return level >= self._limit

    def is_reached(self, key: Hashable) -> bool:
        return self._level(key) >= self._limit

    def _level(self, key: Hashable) -> float:
        now = self._clock()
        level, at = self._levels.get(key, (0.0, now))
        return max(0.0, level - self._per_s * (now - at))


# Bytes of a frame: large records travel in parts, what comes on the others is small (a doctor's echo is 1 MiB).
_MAX_FRAME_BYTES = {"data": MAX_PART_BYTES, "snapshots": 1 << 16, "control": 2 << 20}
# Unfinished, of all connections of a channel without a session together. An actor names its session before it sends
# records; a doctor has echoes of 4 MiB under way.
_STRANGERS_BYTES = {"data": 2 << 20, "snapshots": 1 << 20, "control": 5 << 20}
_UNFINISHED_BYTES = 16 << 20  # what a kernel may have buffered (6 MiB) comes on top of a message
_FAILED_HANDSHAKES = {
    Outcome.FOREIGN: "a key exchange for another learner, or none at all: its own output has the reason",
    Outcome.MISMATCH: "a connection without a key: an actor's own output has the remedy",
    Outcome.CLOSED: "a connection that ended before it named a key: a port scan, or an actor without a key",
}
_KEPT_BACK = 128  # open files that are left to the journal, checkpoints and the rest of the process
_OF_SESSION = 6  # open files: three sockets, each of which the guard holds too
_REMEMBERED = 256  # complaints that are not logged again
_BATCH = 64  # messages taken from one socket before the others get their turn
_LINES = 30  # complaints logged in a minute; more are only counted
_SHARED = ("malformed", "ignored", "stale", "refused", "lost", "replies_dropped")
_DATA_COUNTERS = (
    *_SHARED, "records", "steps", "received_bytes", "duplicates", "gaps", "orphans", "rejected", "parts",
)  # fmt: skip
_CONTROL_COUNTERS = (
    *_SHARED, "pieces", "snapshot_bytes", "keys_refused", "handshakes_failed", "probes", "probes_dropped",
    "connections_cut", "statuses",
)  # fmt: skip


def sessions_that_fit(wanted: int) -> int:
    """Return how many sessions this process may have files open for, up to `wanted`; its soft limit is raised for them.

    Each may be there twice, as a stranger that comes back. Raises ConfigError where there is no room for one.
    """
    of_each = 2 * _OF_SESSION
    limit = allow_open_files(_KEPT_BACK + of_each * wanted)
    fitting = min(wanted, (limit - _KEPT_BACK) // of_each)
    if fitting < 1:
        raise ConfigError(
            f"this process may have {limit} open files, and an actor needs {_KEPT_BACK + of_each}: raise the limit "
            "(ulimit -n)"
        )
    if fitting < wanted:
        logger.warning(
            f"{fitting} actors can connect, not transport.max_sessions={wanted}: this process may have {limit} open "
            f"files. Raise that limit (ulimit -Hn {_KEPT_BACK + of_each * wanted}, as root) before the learner starts"
        )
    return fitting


class ServerSockets:
    """Sockets bound to `port` (data) and the two after it (snapshots, control).

    The data socket belongs to the data thread; the others, libzmq's requests about keys and the monitors to the control
    thread. What cannot be sent or understood is counted, and logged once per peer and kind: neither raises.
    Raises ConfigError for a port in use or a foreign address.
    """

    def __init__(self, config: TransportConfig, bind: str, port: int, keys: ServerKeys | None = None) -> None:
        self.config, self.max_sessions = config, sessions_that_fit(config.max_sessions)
        self.limits = Limits(config.max_message_bytes, MAX_ARRAYS)
        data, control = (Counters(dict.fromkeys(names, 0)) for names in (_DATA_COUNTERS, _CONTROL_COUNTERS))
        self.counters = {"data": data, "snapshots": control, "control": control}  # by thread
        # Of malformed messages, likewise. Not by address: an honest actor may share an attacker's, behind a tunnel for
        # instance. What is dropped unread does not count, so that a flood costs one decoding a second.
        data_peers, peers = (RateLimiter(MAX_MALFORMED, FORGIVEN_PER_S) for _ in range(2))
        self._peers = {"data": data_peers, "snapshots": peers, "control": peers}
        self.wakers = {"data": Waker(), "control": Waker()}  # of both threads
        self._outgoing: collections.deque[tuple[bytes, list[Frame]]] = collections.deque()
        self._complaints: collections.OrderedDict[tuple[str, str, str], None] = collections.OrderedDict()
        self._lines: collections.deque[float] = collections.deque(maxlen=_LINES)  # when the last ones were logged
        self._complaining = threading.Lock()  # of the two above
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._pollers = {"data": zmq.Poller(), "control": zmq.Poller()}
        for name, poller in self._pollers.items():
            poller.register(self.wakers[name].fileno(), zmq.POLLIN)
        self.authenticator: Authenticator | None = None
        largest = MAX_PART_BYTES + MAX_HEADER_BYTES
        queued = CREDIT_BYTES
        queued += queued // 8 + _UNFINISHED_BYTES  # with the frames' heads
        limits = {
            channel: ChannelLimits(
                most, largest + _UNFINISHED_BYTES, queued, waits=channel == "data", strangers=self.max_sessions
            )
            for channel, most in _STRANGERS_BYTES.items()
        }
        self.guard = ConnectionGuard(limits, self._on_cut, HANDSHAKE_EVENTS)
        if keys is not None:
            self.authenticator = Authenticator(self._context, keys, control, self.complain, port)
            self._pollers["control"].register(self.authenticator.socket, zmq.POLLIN)
        for offset, channel in enumerate(CHANNELS):
            self._bind(channel, bind, port + offset, port)

    def _bind(self, channel: str, bind: str, port: int, first: int) -> None:
        s = sockets.make_socket(self._context, zmq.ROUTER, self.config.max_message_bytes, _MAX_FRAME_BYTES[channel])
        self._sockets[channel] = s
        if self.authenticator is not None:
            self.authenticator.secure(s)
        self.guard.watch(channel, s, port)
        self._pollers["control"].register(self.guard.monitors[channel], zmq.POLLIN)
        try:
            s.bind(endpoint("127.0.0.1" if bind == "localhost" else bind, port))
        except zmq.ZMQError as e:
            self.close()
            if e.errno != errno.EADDRINUSE:
                raise ConfigError(f"cannot listen on {bind} port {port}: {e.strerror}", parameter="bind") from e
            raise ConfigError(
                f"port {port} of {bind} is in use: another learner may be running there. Stop it, or choose another "
                f"port for learner and actors (three are used: {first}, {first + 1}, {first + 2})",
                parameter="port",
            ) from e
        self._pollers["data" if channel == "data" else "control"].register(s, zmq.POLLIN)

    def _poll(self, thread: str, seconds: float) -> dict[Any, int]:
        ready = dict(self._pollers[thread].poll(round(1000 * seconds)))
        if self.wakers[thread].fileno() in ready:
            self.wakers[thread].drain()
        return ready

    def wait_data(self, seconds: float) -> bool:
        """Wait for a data message, for the thread's waker or for `seconds`; True where there is a message."""
        found = self._sockets["data"] in self._poll("data", seconds)
        self.guard.drained += not found
        return found

    def wait_control(self, seconds: float) -> set[str]:
        """Wait for the other channels, for the thread's waker or for `seconds`; returns the channels with messages."""
        ready = self._poll("control", min(seconds, max(0.0, self.guard.look_at - time.monotonic())))
        if self.authenticator is not None and self.authenticator.socket in ready:
            self.authenticator.serve()
        for channel, monitor in self.guard.monitors.items():
            if monitor in ready:
                for outcome in itertools.starmap(outcome_of, self.guard.read(channel)):
                    # Of handshakes that ended before a key was named; libzmq does not report whose.
                    if outcome in _FAILED_HANDSHAKES and self.authenticator is not None and channel == "control":
                        self.counters["control"]["handshakes_failed"] += 1
                        self.complain("control", "an unknown peer", _FAILED_HANDSHAKES[outcome])
        return {channel for channel, s in self._sockets.items() if s in ready and channel != "data"}

    def deliver(self, channel: str, handler: Callable[[bytes, list[Frame]], None]) -> None:
        """Call `handler` with identity and frames of a batch of messages. Its WireErrors count against their sender."""
        counters, peers = self.counters[channel], self._peers[channel]
        for _ in range(_BATCH):
            frames = try_receive(self._sockets[channel])
            if frames is None:
                self.guard.drained += channel == "data"
                return
            identity = frames[0].bytes
            if not self.guard.count(channel, identity):
                self.guard.know(channel, identity, sockets.descriptor_of(frames[-1]))
            if peers.is_reached((channel, identity)):
                counters["ignored"] += 1
                continue
            try:
                handler(identity, list(frames[1:]))
            except WireError as e:
                counters["malformed"] += 1
                self.complain(channel, address_of(frames), f"malformed: {e}")
                if peers.add((channel, identity)):
                    self.complain(channel, address_of(frames), "too many malformed: not read for now")

    def _on_cut(self, channel: str, why: str) -> None:
        self.counters["control"]["connections_cut"] += 1
        self.complain(channel, "some peer", why)

    def send(self, channel: str, identity: bytes, frames: list[Frame]) -> bool:
        """Send to one peer. One that is gone or does not read is counted: every answer is repeatable."""
        sent = bool(identity) and try_send(self._sockets[channel], [identity, *frames])
        self.counters[channel]["replies_dropped"] += not sent
        return sent

    def send_later(self, identity: bytes, frames: list[Frame]) -> None:
        """Queue a message of the control channel, before all others. For the data thread."""
        self._outgoing.append((identity, frames))
        self.wakers["control"].wake()

    def send_outgoing(self) -> None:
        while self._outgoing:
            self.send("control", *self._outgoing.popleft())

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
        self.guard.close()
        self._context.destroy(linger=0)
        for waker in self.wakers.values():
            waker.close()


def address_of(frames: list[Any]) -> str:
    """Return the network address of a received message."""
    try:
        return str(frames[-1].get("Peer-Address")).removeprefix("::ffff:") if frames else "unknown"
    except zmq.ZMQError:  # a transport without addresses
        return "unknown"

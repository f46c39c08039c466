"""The learner's ROUTER socket, which two threads share, and limits on what peers send."""

from __future__ import annotations

import collections
import errno
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import zmq

from serl_chunk.config.transport import TransportConfig
from serl_chunk.io import allow_open_files
from serl_chunk.transport.security.client import HANDSHAKE_EVENTS, Outcome, outcome_of
from serl_chunk.transport.security.server import Authenticator, ServerKeys
from serl_chunk.transport.wire.handshake import (
    CHANNELS,
    CREDIT_BYTES,
    MAX_ARRAYS,
    TOKEN_BYTES,
    TOKEN_MARK,
    Clock,
    Counters,
)
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


# Unfinished, of all connections without a session together. An actor names its session before it sends records; a
# doctor has echoes of 4 MiB under way.
_STRANGERS_BYTES = 5 << 20
_UNFINISHED_BYTES = 16 << 20  # what a kernel may have buffered (6 MiB) comes on top of a message
_FAILED_HANDSHAKES = {
    Outcome.FOREIGN: "a key exchange for another learner, or none at all: its own output has the reason",
    Outcome.MISMATCH: "a connection without a key: an actor's own output has the remedy",
    Outcome.CLOSED: "a connection that ended before it named a key: a port scan, or an actor without a key",
}
_KEPT_BACK = 128  # open files that are left to the journal, checkpoints and the rest of the process
_OF_SESSION = 2 * len(CHANNELS)  # open files: its connections, each of which the guard holds too
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)  # as numbers they take half the time
_SOCKET = "socket"  # the only one that the guard watches
_REMEMBERED = 256  # complaints that are not logged again
_BATCH = 64  # messages that a thread takes before its other work gets a turn
_LATE_S = 0.02  # what a record may take until the control thread receives in the data thread's place
# Messages, and bytes, that one thread receives for the other. Fewer than a batch wait for the control thread: it then
# receives too, before it looks at what each connection has completed.
_INBOXES = {"data": (math.inf, 8 * CREDIT_BYTES), "control": (_BATCH // 2, math.inf)}
_FRAME_BYTES = 500  # that a frame takes in addition to its content
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


class _Inbox(collections.deque[list[Any]]):
    """Messages that one thread received for another."""

    def __init__(self, messages: float, nbytes: float) -> None:
        super().__init__()
        self._most, self._most_bytes, self._nbytes = messages, nbytes, 0

    @property
    def is_full(self) -> bool:
        return len(self) >= self._most or self._nbytes >= self._most_bytes

    def put(self, frames: list[Any]) -> None:
        self.append(frames)
        self._nbytes += _memory_of(frames)

    def take(self) -> list[Any]:
        frames = self.popleft()
        self._nbytes -= _memory_of(frames)
        return frames


def _memory_of(frames: list[Any]) -> int:
    return sum(_FRAME_BYTES + len(frame) for frame in frames)


class ServerSockets:
    """A socket bound to `port`. An actor has a connection to it for each of CHANNELS.

    Two threads share it under a lock. The data thread receives for both; where a record or a flood keeps it from that,
    the control thread does, so that neither delays a heartbeat. libzmq's requests about keys and the monitor belong to
    the control thread. What cannot be sent or understood is counted, and logged once per peer and kind: neither raises.
    Raises ConfigError for a port in use or a foreign address.
    """

    def __init__(self, config: TransportConfig, bind: str, port: int, keys: ServerKeys | None = None) -> None:
        self.config, self.max_sessions = config, sessions_that_fit(config.max_sessions)
        self.limits = Limits(config.max_message_bytes, MAX_ARRAYS)
        data, control = (Counters(dict.fromkeys(names, 0)) for names in (_DATA_COUNTERS, _CONTROL_COUNTERS))
        self.counters = {"data": data, "control": control}  # by thread, as all that follows
        # Of malformed messages. Not by address: an honest actor may share an attacker's, behind a tunnel for instance.
        # What is dropped unread does not count, so that a flood costs one decoding a second.
        self._peers = {thread: RateLimiter(MAX_MALFORMED, FORGIVEN_PER_S) for thread in self.counters}
        self.wakers = {thread: Waker() for thread in self.counters}
        self._inboxes = {thread: _Inbox(*limits) for thread, limits in _INBOXES.items()}
        self._dropped = False  # records, while the data thread stood still
        self._pollers = {thread: zmq.Poller() for thread in self.counters}
        for thread, poller in self._pollers.items():
            poller.register(self.wakers[thread].fileno(), zmq.POLLIN)
        # When the data thread last was free to receive; inf while it waits for a message, -inf while it waits for room.
        self._idle_at = math.inf
        self._complaints: collections.OrderedDict[tuple[str, str, str], None] = collections.OrderedDict()
        self._lines: collections.deque[float] = collections.deque(maxlen=_LINES)  # when the last ones were logged
        self._complaining = threading.Lock()  # of the two above
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        largest = MAX_PART_BYTES + MAX_HEADER_BYTES
        queued = CREDIT_BYTES
        queued += queued // 8 + _UNFINISHED_BYTES  # with the frames' heads
        strangers = len(CHANNELS) * self.max_sessions
        limits = ChannelLimits(_STRANGERS_BYTES, largest + _UNFINISHED_BYTES, queued, waits=True, strangers=strangers)
        self.guard = ConnectionGuard({_SOCKET: limits}, self._on_cut, HANDSHAKE_EVENTS)
        self.authenticator: Authenticator | None = None
        if keys is not None:
            self.authenticator = Authenticator(self._context, keys, control, self.complain, port)
            self._pollers["control"].register(self.authenticator.socket, zmq.POLLIN)
        self._socket = sockets.make_socket(self._context, zmq.ROUTER, config.max_message_bytes, MAX_PART_BYTES)
        self._lock = threading.Lock()  # of the socket and the inboxes
        self._bind(bind, port)

    def _bind(self, bind: str, port: int) -> None:
        if self.authenticator is not None:
            self.authenticator.secure(self._socket)
        self.guard.watch(_SOCKET, self._socket, port)
        self._pollers["control"].register(self.guard.monitors[_SOCKET], zmq.POLLIN)
        try:
            self._socket.bind(endpoint("127.0.0.1" if bind == "localhost" else bind, port))
        except zmq.ZMQError as e:
            self.close()
            if e.errno != errno.EADDRINUSE:
                raise ConfigError(f"cannot listen on {bind} port {port}: {e.strerror}", parameter="bind") from e
            raise ConfigError(
                f"port {port} of {bind} is in use: another learner may be running there. Stop it, or choose another "
                "port for learner and actors",
                parameter="port",
            ) from e
        self._pollers["data"].register(self._socket.get(zmq.FD), zmq.POLLIN)

    def _poll(self, thread: str, seconds: float) -> dict[Any, int]:
        ready = dict(self._pollers[thread].poll(round(1000 * seconds)))
        if self.wakers[thread].fileno() in ready:
            self.wakers[thread].drain()
        return ready

    def wait_data(self, seconds: float) -> None:
        """Wait for a message, for the thread's waker or for `seconds`."""
        with self._lock:  # the descriptor reports only what came since the socket was last used
            full = self._inboxes["control"].is_full
            if (self._has_message() and not full) or self._inboxes["data"]:
                return
            self._idle_at = -math.inf if full else math.inf
        self._poll("data", seconds)
        self._idle_at = time.monotonic()

    def wait_control(self, seconds: float) -> None:
        """Wait for the thread's waker or for `seconds`, and attend to keys and the monitor."""
        with self._lock:
            if self._has_message():  # which the data thread may not see, as this one has used the socket since
                self.wakers["data"].wake()
            waits = not self._inboxes["control"]
        wait = min(seconds, max(0.0, self.guard.look_at - time.monotonic()))
        ready = self._poll("control", wait if waits else 0.0)
        if self.authenticator is not None and self.authenticator.socket in ready:
            self.authenticator.serve()
        if self.guard.monitors[_SOCKET] in ready:
            for outcome in itertools.starmap(outcome_of, self.guard.read(_SOCKET)):
                # Of handshakes that ended before a key was named; libzmq does not report whose.
                if outcome in _FAILED_HANDSHAKES and self.authenticator is not None:
                    self.counters["control"]["handshakes_failed"] += 1
                    self.complain("control", "an unknown peer", _FAILED_HANDSHAKES[outcome])

    def _has_message(self) -> bool:
        return bool(int(self._socket.get(_EVENTS)) & _POLLIN)

    def _take(self, thread: str) -> list[Any] | None:
        """Return the next message for `thread`, and receive those before it for the other one; None for none now."""
        inbox, other = self._inboxes[thread], "control" if thread == "data" else "data"
        late = 0.0 if thread == "data" else time.monotonic() - self._idle_at
        with self._lock:
            if inbox:
                frames = inbox.take()
                if not inbox and late > _LATE_S:
                    self.wakers[other].wake()  # it may wait for room
                return frames
            if thread == "control" and late <= _LATE_S:
                return None
            for _ in range(_BATCH):
                full = self._inboxes[other].is_full
                if full and late < self.config.heartbeat:
                    return None
                if (received := try_receive(self._socket)) is None:
                    self.guard.drained += 1
                    return None
                if not self.guard.count(_SOCKET, received[0].bytes):
                    self.guard.know(_SOCKET, received[0].bytes, sockets.descriptor_of(received[-1]))
                if _is_record(received) is (thread == "data"):
                    return received
                if full:
                    self._dropped = True  # its actor sends it again
                else:
                    self._inboxes[other].put(received)
                self.wakers[other].wake()
        return None

    def has_dropped(self) -> bool:
        """Return, once all others were delivered, whether records were dropped. For the data thread."""
        if not self._dropped or self._inboxes["data"]:
            return False
        self._dropped = False
        return True

    def deliver(self, thread: str, handler: Callable[[bytes, list[Frame]], None]) -> None:
        """Call `handler` with identity and frames of a batch of messages. Its WireErrors count against their sender."""
        counters, peers = self.counters[thread], self._peers[thread]
        for _ in range(_BATCH):
            if thread == "data":
                self._idle_at = time.monotonic()
            if (frames := self._take(thread)) is None:
                return
            identity = frames[0].bytes
            if peers.is_reached(identity):
                counters["ignored"] += 1
                continue
            try:
                handler(identity, list(frames[1:]))
            except WireError as e:
                counters["malformed"] += 1
                self.complain(thread, address_of(frames), f"malformed: {e}")
                if peers.add(identity):
                    self.complain(thread, address_of(frames), "too many malformed: not read for now")

    def look(self, admitted: Iterable[bytes]) -> None:
        """Shut down connections that hold too much, where a look is due. `admitted`: identities of sessions."""
        self.guard.look((_SOCKET, identity) for identity in admitted)

    def _on_cut(self, channel: str, why: str) -> None:
        self.counters["control"]["connections_cut"] += 1
        self.complain("control", "some peer", why)

    def send(self, thread: str, identity: bytes, frames: list[Frame]) -> bool:
        """Send to one peer, from `thread`. One that is gone or does not read is counted: every answer is repeatable."""
        with self._lock:
            sent = bool(identity) and try_send(self._socket, [identity, *frames])
        self.counters[thread]["replies_dropped"] += not sent
        return sent

    def complain(self, thread: str, peer: str, what: str) -> None:
        """Log once per thread, peer and kind of trouble (`what` up to its first colon). For any thread."""
        key, now = (thread, peer, what.split(":")[0]), time.monotonic()
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
            logger.warning("%s message from %s: %s (logged once, counted always)", thread, peer, shown(what))

    def close(self) -> None:
        self.guard.close()
        self._context.destroy(linger=0)
        for waker in self.wakers.values():
            waker.close()


def _is_record(frames: list[Any]) -> bool:
    """Return whether a received message is the data thread's: it begins with a session's token."""
    return len(frames) > 1 and len(frames[1]) == TOKEN_BYTES and bool(frames[1].bytes.startswith(TOKEN_MARK))


def address_of(frames: list[Any]) -> str:
    """Return the network address of a received message."""
    try:
        return str(frames[-1].get("Peer-Address")).removeprefix("::ffff:") if frames else "unknown"
    except zmq.ZMQError:  # a transport without addresses
        return "unknown"

"""Bounds what a peer makes the learner hold before a message is complete.

libzmq does not limit the frames of an unfinished message. The kernel counts what a connection has received (TCP_INFO),
and this module the messages it has completed. A connection that receives too much without completing one is shut down,
and libzmq then frees what it held.
"""

from __future__ import annotations

import collections
import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable

import zmq
from zmq.utils.monitor import parse_monitor_message

from serl_chunk.transport.security.client import HANDSHAKE_EVENTS, Outcome, outcome_of

# Unfinished, of all connections of a channel without a session together. An actor names its session before it sends
# records; a doctor has echoes of 4 MiB under way. Frames of 2 bytes make libzmq hold 32 times as much.
STRANGERS_BYTES = {"data": 2 << 20, "snapshots": 1 << 20, "control": 5 << 20}
UNFINISHED_BYTES = 16 << 20  # what a kernel may have buffered (6 MiB) comes on top of a message
_STRANGERS = 64  # connections of a channel without a session; one more ends the oldest
_RECEIVED_AT = 128  # offset of tcpi_bytes_received in Linux's struct tcp_info
_HOT = 8  # parts of a limit: from the first on it is looked at often
HOT_S, CALM_S = 0.002, 0.02  # between looks: 20 ms are 2.5 MB at 1 Gb/s


class _Connection:
    """One accepted connection. The duplicate descriptor keeps its number from being given to another file."""

    def __init__(self, s: socket.socket) -> None:
        self.socket = s
        self.received = self.completed_at = 0  # bytes; now, and when a message was last seen to be complete
        self.messages = 0
        self.is_cut = False

    @property
    def pending(self) -> int:
        return self.received - self.completed_at


class ConnectionGuard:
    """Watches connections for the control thread; limits only their number where the kernel counts no bytes."""

    def __init__(self, queued_bytes: int, largest_message: int, on_cut: Callable[[str, str], None]) -> None:
        """`queued_bytes`: in flight of a session whose records wait. `on_cut`: (channel, why), once for each."""
        self.look_at = 0.0  # monotonic seconds of the next look
        self.drained = 0  # how often nothing was left to receive on the data channel; the data thread counts
        self._queued = queued_bytes + queued_bytes // 8 + UNFINISHED_BYTES  # with the frames' heads
        self._unfinished = largest_message + UNFINISHED_BYTES
        self._on_cut = on_cut
        self._connections: dict[tuple[str, int], _Connection] = {}  # (channel, descriptor), in the order of acceptance
        self._drained = 0  # at the last look
        # (channel, identity) -> [descriptor, complete messages]: written by the thread that receives.
        self._peers: dict[tuple[str, bytes], list[int]] = {}
        self.monitors: dict[str, zmq.Socket[bytes]] = {}  # to poll for reading
        self._watched: dict[str, tuple[zmq.Socket[bytes], int]] = {}  # with their ports

    def watch(self, channel: str, s: zmq.Socket[bytes], port: int) -> None:
        """Watch a socket; call it before the socket is bound to `port`."""
        events = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | HANDSHAKE_EVENTS
        self._watched[channel], self.monitors[channel] = (s, port), s.get_monitor_socket(events)
        self.monitors[channel].linger = 0

    def read(self, channel: str) -> list[Outcome]:
        """Note accepted and closed connections; returns the outcomes of handshakes, the newest last."""
        outcomes: list[Outcome] = []
        monitor = self.monitors[channel]
        while True:
            try:
                message = parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return outcomes
            event, value = int(message["event"]), int(message["value"])
            if event == zmq.EVENT_ACCEPTED:
                self._accepted(channel, value)
            elif event == zmq.EVENT_DISCONNECTED:
                self._forget(channel, value)
            else:
                outcomes.append(outcome_of(event, value))

    def _accepted(self, channel: str, fd: int) -> None:
        try:
            s = socket.socket(fileno=os.dup(fd))
        except OSError:  # it is gone already
            return
        with contextlib.suppress(OSError, IndexError):
            if s.getsockname()[1] == self._watched[channel][1]:
                self._forget(channel, fd)
                self._connections[channel, fd] = _Connection(s)
                return
        s.close()  # it is gone, and its number is another file's

    def _forget(self, channel: str, fd: int) -> None:
        if (gone := self._connections.pop((channel, fd), None)) is not None:
            gone.socket.close()

    def count(self, channel: str, frames: list[zmq.Frame]) -> None:
        """Count a complete message. For the thread that receives the channel."""
        key = channel, frames[0].bytes
        if key not in self._peers:
            self._peers[key] = [_descriptor_of(frames), 0]
        self._peers[key][1] += 1

    def look(self, admitted: Iterable[tuple[str, bytes]]) -> None:
        """Shut down what exceeds a limit, where a look is due. `admitted`: (channel, identity) of live sessions."""
        now = time.monotonic()
        if now < self.look_at:
            return
        sessions, strangers, hot = set(admitted), [], False
        known: set[tuple[str, int]] = set()
        messages: collections.Counter[tuple[str, int]] = collections.Counter()
        for peer, (fd, n) in list(self._peers.items()):
            messages[peer[0], fd] += n
            if peer in sessions:
                known.add((peer[0], fd))
            if (peer[0], fd) not in self._connections:
                self._peers.pop(peer, None)
        drained = self.drained
        idle, self._drained = drained > self._drained + 1, drained
        for key, c in self._connections.items():
            # Nothing complete waits: all bytes of the last look are of an unfinished message. On the other channels
            # nothing ever waits for long.
            seen = c.pending if idle or key[0] != "data" else 0
            c.received = _received(c.socket)
            if messages[key] != c.messages:
                c.messages, c.completed_at = messages[key], c.received
            elif key in known and (seen > self._unfinished or c.pending > self._queued):
                self._cut(key, c, f"unfinished message: {c.pending >> 20} MiB of it came from an actor's connection")
            if key not in known and not c.is_cut:
                strangers.append((key, c))
            hot = hot or c.pending > (self._unfinished if key in known else STRANGERS_BYTES[key[0]]) // _HOT
        for channel in self.monitors:
            self._limit_strangers(channel, [(key, c) for key, c in strangers if key[0] == channel])
        self.look_at = now + (HOT_S if hot else CALM_S)

    def _limit_strangers(self, channel: str, strangers: list[tuple[tuple[str, int], _Connection]]) -> None:
        total = sum(c.pending for _, c in strangers)
        for key, c in sorted(strangers, key=lambda item: -item[1].pending):
            if total <= STRANGERS_BYTES[channel]:
                break
            total -= c.pending
            self._cut(key, c, "unfinished message: connections without a session hold too much of such")
        left = [(key, c) for key, c in strangers if not c.is_cut]  # the oldest first
        for key, c in left[: max(0, len(left) - _STRANGERS)]:
            self._cut(key, c, "too many connections without a session: the oldest one is closed")

    def _cut(self, key: tuple[str, int], c: _Connection, why: str) -> None:
        if not c.is_cut:
            c.is_cut = True
            with contextlib.suppress(OSError):  # it has gone
                c.socket.shutdown(socket.SHUT_RDWR)
            self._on_cut(key[0], why)

    def close(self) -> None:
        for s, _ in self._watched.values():
            if not s.closed:
                s.disable_monitor()
        for monitor in self.monitors.values():
            monitor.close()
        for c in self._connections.values():
            c.socket.close()
        self._connections.clear()


def _received(s: socket.socket) -> int:
    with contextlib.suppress(OSError, AttributeError, struct.error):  # it has gone, or the system does not count
        info = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_AT + 8)
        return int(struct.unpack_from("=Q", info, _RECEIVED_AT)[0])
    return 0


def _descriptor_of(frames: list[zmq.Frame]) -> int:
    try:
        return int(frames[-1].get("__fd"))
    except zmq.ZMQError:
        return -1

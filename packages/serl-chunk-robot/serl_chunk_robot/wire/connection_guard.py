"""Bounds what peers make a server hold before a message is complete.

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
from typing import Callable, Dict, Iterable, List, Mapping, NamedTuple, Set, Tuple

import zmq

_EVENT = struct.Struct("=Hi")  # number and value, as a monitor sends them
_RECEIVED_AT = 128  # offset of tcpi_bytes_received in Linux's struct tcp_info
_HOT = 8  # parts of a limit: from the first on it is looked at often
HOT_S, CALM_S = 0.002, 0.02  # between looks: 20 ms are 2.5 MB at 1 Gb/s


class ChannelLimits(NamedTuple):
    """Limits of one socket. Frames of 2 bytes make libzmq hold 32 times as many bytes as are counted."""

    strangers_bytes: int  # unfinished, of all connections that are not admitted together
    unfinished: int  # of one admitted connection, while nothing complete waits
    queued: int  # of one admitted connection, complete messages that wait included
    waits: bool = False  # whether complete messages may wait for long: then the receiver counts `drained`
    strangers: int = 64  # connections that are not admitted; one more ends the oldest
    greeted_stay: bool = False  # one whose handshake is not done ends before that; needs EVENT_HANDSHAKE_SUCCEEDED


class _Connection:
    """One accepted connection. The duplicate descriptor keeps its number from being given to another file."""

    def __init__(self, s: socket.socket) -> None:
        self.socket = s
        self.received = self.completed_at = 0  # bytes; now, and when a message was last seen to be complete
        self.messages = 0
        self.is_cut = self.greeted = False

    @property
    def pending(self) -> int:
        return self.received - self.completed_at


class ConnectionGuard:
    """Watches connections for one thread; limits only their number where the kernel counts no bytes.

    Args:
        limits: by channel, the name of a socket.
        on_cut: called with channel and reason, once for each connection.
        events: of the sockets' monitors that `read` returns.
        calm: seconds between two looks while no limit is near.
    """

    def __init__(
        self, limits: Mapping[str, ChannelLimits], on_cut: Callable[[str, str], None], events: int = 0,
        calm: float = CALM_S,
    ) -> None:  # fmt: skip
        self.look_at = 0.0  # monotonic seconds of the next look
        self.drained = 0  # how often nothing was left to receive on the channels that wait; their receiver counts
        self._limits, self._on_cut, self._events, self._calm = limits, on_cut, events, calm
        self._connections: Dict[Tuple[str, int], _Connection] = {}  # (channel, descriptor), in the order of acceptance
        self._drained = 0  # at the last look
        # (channel, identity) -> [descriptor, complete messages]: written by the thread that receives.
        self._peers: Dict[Tuple[str, bytes], List[int]] = {}
        self.monitors: Dict[str, zmq.Socket[bytes]] = {}  # to poll for reading
        self._watched: Dict[str, Tuple[zmq.Socket[bytes], int]] = {}  # with their ports

    def watch(self, channel: str, s: zmq.Socket[bytes], port: int) -> None:
        """Watch a socket; call it before the socket is bound to `port`."""
        events = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | self._events
        self._watched[channel], self.monitors[channel] = (s, port), s.get_monitor_socket(events)
        self.monitors[channel].linger = 0

    def read(self, channel: str) -> List[Tuple[int, int]]:
        """Note accepted and closed connections; returns the other events with their values, the newest last."""
        others: List[Tuple[int, int]] = []
        monitor = self.monitors[channel]
        while True:
            try:
                event, value = _EVENT.unpack(monitor.recv_multipart(zmq.NOBLOCK)[0])
            except zmq.Again:
                return others
            if event == zmq.EVENT_ACCEPTED:
                self._accepted(channel, value)
            elif event == zmq.EVENT_DISCONNECTED:
                self._forget(channel, value)
            else:
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED and (channel, value) in self._connections:
                    self._connections[channel, value].greeted = True
                others.append((event, value))

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
        gone = self._connections.pop((channel, fd), None)
        if gone is not None:
            gone.socket.close()

    def count(self, channel: str, identity: bytes) -> bool:
        """Count a complete message. For the thread that receives the channel. False: `know` its peer first."""
        peer = self._peers.get((channel, identity))
        if peer is not None:
            peer[1] += 1
        return peer is not None

    def know(self, channel: str, identity: bytes, descriptor: int) -> None:
        """Count the first message of a peer, which came over the connection with `descriptor`."""
        self._peers[channel, identity] = [descriptor, 1]

    def cut(self, channel: str, identity: bytes, why: str) -> None:
        """Shut down the connection of a peer whose messages were counted."""
        key = channel, self._peers.get((channel, identity), [-1])[0]
        if key in self._connections:
            self._cut(key, self._connections[key], why)

    def look(self, admitted: Iterable[Tuple[str, bytes]]) -> None:
        """Shut down what exceeds a limit, where a look is due. `admitted`: (channel, identity) of known peers."""
        now = time.monotonic()
        if now < self.look_at:
            return
        peers, hot = set(admitted), False
        strangers: List[Tuple[Tuple[str, int], _Connection]] = []
        known: Set[Tuple[str, int]] = set()
        messages: collections.Counter[Tuple[str, int]] = collections.Counter()
        for peer, (fd, n) in list(self._peers.items()):
            messages[peer[0], fd] += n
            if peer in peers:
                known.add((peer[0], fd))
            if (peer[0], fd) not in self._connections:
                self._peers.pop(peer, None)
        drained = self.drained
        idle, self._drained = drained > self._drained + 1, drained
        for key, c in self._connections.items():
            limits = self._limits[key[0]]
            # Nothing complete waits: all bytes of the last look are of an unfinished message.
            seen = c.pending if idle or not limits.waits else 0
            c.received = _received(c.socket)
            if messages[key] != c.messages:
                c.messages, c.completed_at = messages[key], c.received
            elif key in known and (seen > limits.unfinished or c.pending > limits.queued):
                self._cut(key, c, f"unfinished message: {c.pending >> 10} KiB of it came from a known connection")
            if key not in known and not c.is_cut:
                strangers.append((key, c))
            hot = hot or c.pending > (limits.unfinished if key in known else limits.strangers_bytes) // _HOT
        for channel in self.monitors:
            self._limit_strangers(channel, [(key, c) for key, c in strangers if key[0] == channel])
        self.look_at = now + (HOT_S if hot else self._calm)

    def _limit_strangers(self, channel: str, strangers: List[Tuple[Tuple[str, int], _Connection]]) -> None:
        limits, total = self._limits[channel], sum(c.pending for _, c in strangers)
        for key, c in sorted(strangers, key=lambda item: -item[1].pending):
            if total <= limits.strangers_bytes:
                break
            total -= c.pending
            self._cut(key, c, "unfinished message: connections that are not known yet hold too much of such")
        left = [(key, c) for key, c in strangers if not c.is_cut]  # the oldest first
        if limits.greeted_stay:
            left.sort(key=lambda item: item[1].greeted)
        for key, c in left[: max(0, len(left) - limits.strangers)]:
            self._cut(key, c, "too many connections that are not known yet: the oldest one is closed")

    def _cut(self, key: Tuple[str, int], c: _Connection, why: str) -> None:
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

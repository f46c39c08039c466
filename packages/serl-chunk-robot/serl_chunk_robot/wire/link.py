"""Messages between two processes of one machine: one end of a pair of sockets, which never blocks.

A message is a kind and bytes. Long ones travel in parts, because the kernel limits a packet. A packet of one byte is
the number of a signal, as `signal.set_wakeup_fd` writes it: also while its process holds the interpreter's lock.
"""

from __future__ import annotations

import socket
from collections import deque
from typing import Deque, Dict, Optional, Tuple

PART = 1 << 15  # bytes of a packet at most
BUFFER = 1 << 20  # bytes under way that are requested of the kernel, which may grant less
SIGNAL = 0  # kind of a packet that a signal's handler wrote
_FIRST, _LAST = 1, 2


def make_pair() -> Tuple[socket.socket, socket.socket]:
    """Return both ends. Packets stay whole and in order."""
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for each in pair:
        each.setblocking(False)
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
    return pair


class Link:
    """One end, for one thread."""

    def __init__(self, s: socket.socket) -> None:
        self.ended = False  # no process has the other end any more
        self._socket = s
        self._unsent: Deque[bytes] = deque()
        self._parts: Dict[int, bytearray] = {}  # kind -> the parts so far of a message
        self._packet = bytearray(PART + 2)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, kind: int, payload: bytes, *, keep: bool = False) -> bool:
        """Send a message. What is not taken now is sent later with `keep`, and else lost: then returns False."""
        self.flush()
        if self._unsent and not keep:
            return False
        last = max(0, len(payload) - 1) // PART
        for k in range(last + 1):
            head = bytes([kind, (_FIRST if k == 0 else 0) | (_LAST if k == last else 0)])
            packet = head + payload[PART * k : PART * (k + 1)]
            if self._unsent or not self._sent(packet):
                if not keep:
                    return False
                self._unsent.append(packet)
        return True

    def flush(self) -> None:
        while self._unsent and self._sent(self._unsent[0]):
            self._unsent.popleft()

    def receive(self) -> Optional[Tuple[int, bytes]]:
        """Return the next message, kind and bytes; None where none has come."""
        while not self.ended:
            try:
                n = self._socket.recv_into(self._packet)
            except BlockingIOError:
                return None
            except OSError:
                n = 0
            if n == 0:
                self.ended = True
            elif n == 1:
                return SIGNAL, bytes(self._packet[:1])
            else:
                kind, flags = self._packet[:2]
                content = bytes(memoryview(self._packet)[2:n])
                if flags == _FIRST | _LAST:
                    self._parts.pop(kind, None)
                    return kind, content
                if flags & _FIRST:
                    self._parts[kind] = bytearray()
                if kind in self._parts:
                    self._parts[kind] += content
                    if flags & _LAST:
                        return kind, bytes(self._parts.pop(kind))
        return None

    def close(self) -> None:
        self._socket.close()

    def _sent(self, packet: bytes) -> bool:
        try:
            self._socket.send(packet)
        except OSError:  # it takes none now, or its process has ended
            return False
        return True

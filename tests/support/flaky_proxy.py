"""A TCP proxy that cuts, delays and throttles what passes through it."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

from serl_chunk.transport.sockets import CHANNELS

_CHUNK = 1 << 16


class FlakyProxy:
    """Forwards `port`, `port + 1`, `port + 2` to the same three ports from `to`.

    Attributes may be changed at any time: `rate` in bytes per second and direction (0: unlimited), `delay` in seconds
    for every chunk, `cut` (no connection is accepted, those there are closed).
    """

    def __init__(self, port: int, to: int) -> None:
        self.rate, self.delay, self.cut = 0.0, 0.0, False
        self.forwarded = self.broken = 0  # bytes, connections
        self._closing = False
        self._pairs: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listeners = []
        for i in range(len(CHANNELS)):
            listener = socket.create_server(("127.0.0.1", port + i))
            self._listeners.append(listener)
            threading.Thread(target=self._accept, args=(listener, to + i), daemon=True).start()

    def _accept(self, listener: socket.socket, to: int) -> None:
        while not self._closing:
            try:
                ours, _ = listener.accept()
                if self.cut:
                    ours.close()
                    continue
                theirs = socket.create_connection(("127.0.0.1", to))
            except OSError:
                continue
            with self._lock:
                self._pairs |= {ours, theirs}
            for a, b in ((ours, theirs), (theirs, ours)):
                threading.Thread(target=self._forward, args=(a, b), daemon=True).start()

    def _forward(self, a: socket.socket, b: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := a.recv(_CHUNK):
                if self.delay:
                    time.sleep(self.delay)
                if self.rate:
                    time.sleep(len(data) / self.rate)
                b.sendall(data)
                self.forwarded += len(data)
        self._drop(a, b)

    def _drop(self, *sockets: socket.socket) -> None:
        for s in sockets:
            with contextlib.suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)
            s.close()
        with self._lock:
            self._pairs -= set(sockets)

    @property
    def connections(self) -> int:
        """How many there are."""
        with self._lock:
            return len(self._pairs) // 2

    def break_connections(self) -> None:
        """Close every connection there is, in the middle of whatever it carries."""
        with self._lock:
            pairs = list(self._pairs)
            self.broken += len(pairs) // 2
        self._drop(*pairs)

    def close(self) -> None:
        """Stop."""
        self._closing = True
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        self.break_connections()


@contextlib.contextmanager
def flaky(port: int, to: int) -> Iterator[FlakyProxy]:
    """A proxy, closed at the end."""
    proxy = FlakyProxy(port, to)
    try:
        yield proxy
    finally:
        proxy.close()

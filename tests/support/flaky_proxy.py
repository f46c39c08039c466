"""A TCP proxy that cuts, delays and throttles what passes through it."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

_CHUNK = 1 << 16
_PACE_S = 0.02  # a throttled chunk is what the rate carries in this time: larger ones would make the link burst


class FlakyProxy:
    """Forwards `port` to `to`.

    Attributes may be changed at any time: `rate` in bytes per second and direction (0: unlimited), `delay` in seconds
    for every chunk, `cut` (no connection is accepted, those there are closed).

    Args:
        shared: `rate` is that of all connections together, as on one line; else each has it to itself.
        buffer: bytes of the kernel's buffers at the proxy's sockets; 0: what the system gives, megabytes, so that a
            sender is rid of a message long before the rate has carried it.
    """

    def __init__(self, port: int, to: int, *, shared: bool = False, buffer: int = 0) -> None:
        self.rate, self.delay, self.cut = 0.0, 0.0, False
        self._buffer = buffer
        self._line = {up: threading.Lock() for up in (True, False)} if shared else None
        self._closing = False
        self._pairs: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", port))
        self._shrink(self._listener)  # before it listens for peers: what it accepts inherits the size
        threading.Thread(target=self._accept, args=(to,), daemon=True).start()

    def _accept(self, to: int) -> None:
        while not self._closing:
            try:
                ours, _ = self._listener.accept()
                if self.cut:
                    ours.close()
                    continue
                theirs = socket.socket()
                self._shrink(theirs)
                theirs.connect(("127.0.0.1", to))
            except OSError:
                continue
            with self._lock:
                self._pairs |= {ours, theirs}
            for a, b, up in ((ours, theirs, True), (theirs, ours, False)):
                threading.Thread(target=self._forward, args=(a, b, up), daemon=True).start()

    def _shrink(self, s: socket.socket) -> None:
        if self._buffer:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._buffer)
            s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._buffer)

    def _chunk(self) -> int:
        return max(512, min(_CHUNK, int(_PACE_S * self.rate))) if self.rate else _CHUNK

    def _forward(self, a: socket.socket, b: socket.socket, up: bool) -> None:
        with contextlib.suppress(OSError):
            while data := a.recv(self._chunk()):
                if self.delay:
                    time.sleep(self.delay)
                if rate := self.rate:
                    with self._line[up] if self._line else contextlib.nullcontext():
                        time.sleep(len(data) / rate)
                b.sendall(data)
        self._drop(a, b)

    def _drop(self, *sockets: socket.socket) -> None:
        for s in sockets:
            with contextlib.suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)
            s.close()
        with self._lock:
            self._pairs -= set(sockets)

    def break_connections(self) -> None:
        """Close every connection there is, in the middle of whatever it carries."""
        with self._lock:
            pairs = list(self._pairs)
        self._drop(*pairs)

    def close(self) -> None:
        """Stop."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.break_connections()


def flaky(port: int, to: int, *, shared: bool = False, buffer: int = 0) -> contextlib.closing[FlakyProxy]:
    """A proxy, closed at the end."""
    return contextlib.closing(FlakyProxy(port, to, shared=shared, buffer=buffer))

"""Bare DEALER/ROUTER sockets with acknowledgements: the same arrays, nothing decoded, nothing kept. A ceiling.

With `file` each message is written to a file before it is sent, as what is recorded has to be; with `curve` (the
learner's key pair) the sockets are encrypted.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from support.transport_baselines import workload

WINDOW_ROWS, ACK_ROWS = 64, 16
BLOCK_BYTES = 1 << 20  # of a message of many rows: as much as ours takes
FILE_BYTES = 16 << 20  # after which the next file begins, and the one before goes: as ours
MEMORY = Path("/dev/shm")
END = b"end"  # of an actor's rows
PUBLISH, STOP = b"publish", b"stop"


class Learner(workload.Publisher):
    """Counts rows, acknowledges them, sends blobs."""

    def open(self, curve: list[str] | None = None, **_: Any) -> dict[str, Any]:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        if curve:
            self._socket.curve_server = 1
            self._socket.curve_secretkey = curve[1].encode()
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._rows: dict[bytes, int] = {}
        self._acknowledged: dict[bytes, int] = {}
        self._bytes = 0
        self._greeted = threading.Event()
        self._orders = self._context.socket(zmq.PAIR)  # to the thread, which alone may use the other socket
        self._orders.bind("inproc://orders")
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return {"port": port}

    def _run(self) -> None:
        orders = self._context.socket(zmq.PAIR)
        orders.connect("inproc://orders")
        poller = zmq.Poller()
        for s in (self._socket, orders):
            poller.register(s, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if orders in ready:
                if orders.recv() == STOP:
                    orders.close()
                    return
                orders.send(b"%.9f" % self._publish())
            for _ in range(ACK_ROWS):
                try:
                    frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    break
                self._take(frames)

    def _take(self, frames: list[zmq.Frame]) -> None:
        sender, header = frames[0].bytes, frames[1].bytes
        if len(frames) == 2 and header != END:  # a greeting
            self._greeted.set()
            self._peer = sender
            return
        rows = self._rows[sender] = self._rows.get(sender, 0) + (0 if header == END else int(header))
        self._bytes += sum(len(f.buffer) for f in frames[1:])
        if header == END or rows - self._acknowledged.get(sender, 0) >= ACK_ROWS:
            self._acknowledged[sender] = rows
            self._socket.send_multipart([sender, b"%d" % rows])

    def close(self) -> dict[str, float]:
        """Stop; what was received since `open`."""
        self._orders.send(STOP)
        self._thread.join()
        self._context.destroy(linger=0)
        return {"steps": sum(self._rows.values()), "bytes": self._bytes}

    def publish(self) -> float:
        """Send a set of parameters to the actor that greeted last; seconds the call took."""
        if not self._greeted.wait(60):
            raise SystemExit("no actor has greeted")
        self._orders.send(PUBLISH)
        return float(self._orders.recv())

    def _publish(self) -> float:
        arrays = list(self._parameters.next().values())
        start = time.monotonic()
        self._socket.send_multipart([self._peer, b"%.9f" % start, *arrays], copy=False)  # type: ignore[list-item]
        return time.monotonic() - start


class RowFile:
    """Writes messages to files of FILE_BYTES; in memory, as the spool that it is compared with."""

    def __init__(self) -> None:
        self._fd, self._size = -1, FILE_BYTES

    def write(self, arrays: list[np.ndarray]) -> None:
        if self._size >= FILE_BYTES:
            self.close()
            self._fd, path = tempfile.mkstemp(dir=MEMORY if MEMORY.is_dir() else None)
            os.unlink(path)  # it goes with its descriptor
            self._size = 0
        self._size += os.writev(self._fd, arrays)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # there was none
            os.close(self._fd)


class Actor:
    """Sends rows within a window."""

    def connect(self, port: int, file: bool = False, curve: list[str] | None = None, **_: Any) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._file = RowFile() if file else None
        if curve:
            self._socket.curve_publickey, self._socket.curve_secretkey = zmq.curve_keypair()
            self._socket.curve_serverkey = curve[0].encode()
        self._socket.connect(f"tcp://127.0.0.1:{port}")
        self._socket.send(b"hello")

    def disconnect(self) -> None:
        self._context.destroy(linger=0)
        if self._file is not None:
            self._file.close()

    def prepare(self, n: int, cameras: bool, batch: int) -> None:
        """Messages of `n` rows in all, `batch` in each where that is no more than a block."""
        source = workload.rows(cameras)
        first = next(source)
        batch = max(1, min(batch, BLOCK_BYTES // first.nbytes))
        self._messages: list[tuple[int, bytes, list[np.ndarray]]] = []
        for at in range(0, n, batch):
            part = [next(source) for _ in range(min(batch, n - at))]
            columns = [[r.action for r in part], *([r.observation[k] for r in part] for k in first.observation)]
            if at < 16 * batch or not cameras:
                arrays = [c[0] if len(part) == 1 else np.stack(c) for c in columns]
            else:  # images take turns here as well
                arrays = [a[: len(part)] if batch > 1 else a for a in self._messages[at // batch % 16][2]]
            self._messages.append((len(part), b"%d" % len(part), arrays))

    def send(self) -> dict[str, float]:
        """Send what was prepared; wait until all of it is acknowledged."""
        cpu, start = time.process_time(), time.monotonic()
        sent = acknowledged = 0
        for rows, header, arrays in self._messages:
            while sent - acknowledged >= WINDOW_ROWS:
                acknowledged = int(self._socket.recv())
            if self._file is not None:
                self._file.write(arrays)
            self._socket.send_multipart([header, *arrays], copy=False)  # type: ignore[list-item]
            sent += rows
        self._socket.send(END)
        while acknowledged < sent:
            acknowledged = int(self._socket.recv())
        return {"start": start, "end": time.monotonic(), "cpu_s": time.process_time() - cpu}

    def newest_after(self, at: float) -> float:
        """Wait for a set of parameters; seconds since it was sent."""
        frames = self._socket.recv_multipart(copy=False)
        return time.monotonic() - float(frames[0].bytes)

    def published_at(self) -> float:
        return 0.0

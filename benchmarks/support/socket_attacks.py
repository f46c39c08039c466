"""Attacks on ZeroMQ sockets from a process of its own: messages that libzmq would not send, floods, foreign keys."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from typing import Any

import zmq

from serl_chunk_robot.wire.curve import Pair, use_keys
from serl_chunk_robot.wire.sockets import make_socket

HERE = "127.0.0.1"
PARTS = 1_800_000  # empty ones in one message
KEYS_A_S = 500
PEERS = 64

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER\x08Identity" + struct.pack(">I", 0)


def greeted(port: int, mechanism: bytes = b"NULL") -> socket.socket:
    """A connection whose greetings are exchanged."""
    s = socket.create_connection(("127.0.0.1", port), 10)
    s.sendall(GREETING.replace(b"NULL".ljust(20, b"\0"), mechanism.ljust(20, b"\0")))
    got = b""
    while len(got) < 64:
        more = s.recv(64 - len(got))
        if not more:
            raise ConnectionError("closed")
        got += more
    return s


def frame_of(part: bytes, *, more: bool) -> bytes:
    """A part of a message as ZMTP has it."""
    head = struct.pack(">BQ", 2 | more, len(part)) if len(part) > 255 else bytes([more, len(part)])
    return head + part


def one_message(port: int, ends: float) -> None:
    """A complete message of many empty parts, again and again."""
    message = frame_of(b"", more=True) * PARTS + frame_of(b"", more=False)
    _raw(port, ends, message)


def no_end(port: int, ends: float) -> None:
    """A message of empty parts that does not end."""
    _raw(port, ends, frame_of(b"", more=True) * (1 << 19))


def no_end_of_large_parts(port: int, ends: float) -> None:
    """A message of parts of 60 KB that does not end."""
    _raw(port, ends, frame_of(bytes(60_000), more=True) * 16)


def no_end_of_states(port: int, ends: float) -> None:
    """The same at the port of the state."""
    ready = READY.replace(b"\0\0\0\x06DEALER", b"\0\0\0\x03SUB")
    _raw(port + 1, ends, frame_of(b"", more=True) * (1 << 19), ready)


def peers(port: int, ends: float) -> None:
    """64 connections that send requests as fast as they can, small and large ones."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sockets = []
    for _ in range(PEERS):
        s = make_socket(context, zmq.DEALER, 1 << 20)
        s.connect(f"tcp://{HERE}:{port}")
        sockets.append(s)
    bodies = (b"\x81\xa2op\xa4ping", b"garbage", bytes(60_000), b"\x82\xa2op\xa7command\xa6number\x01")
    k = 0
    while time.monotonic() < ends:
        for s in sockets:
            k += 1
            with contextlib.suppress(zmq.Again):
                s.send(bodies[k // PEERS % len(bodies)], zmq.NOBLOCK)
            while s.poll(0):
                s.recv()
    context.destroy(linger=0)


def foreign_keys(port: int, ends: float, server: str = "") -> None:
    """500 connections a second with keys that are not admitted."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    pairs, began, k = [Pair.new() for _ in range(50)], time.monotonic(), 0
    sockets: list[zmq.Socket[bytes]] = []
    while time.monotonic() < ends:
        s = make_socket(context, zmq.DEALER, 1 << 20)
        s.setsockopt(zmq.RECONNECT_IVL, -1)
        use_keys(s, server, pairs[k % len(pairs)])
        s.connect(f"tcp://{HERE}:{port}")
        sockets.append(s)
        if len(sockets) > 200:
            sockets.pop(0).close()
        k += 1
        time.sleep(max(0.0, began + k / KEYS_A_S - time.monotonic()))
    context.destroy(linger=0)


ATTACKS: dict[str, Callable[..., None]] = {
    each.__name__: each for each in (one_message, no_end, no_end_of_large_parts, no_end_of_states, peers, foreign_keys)
}


def _raw(port: int, ends: float, block: bytes, ready: bytes = READY) -> None:
    while time.monotonic() < ends:
        with contextlib.suppress(OSError), greeted(port) as s:
            s.settimeout(0.5)
            s.sendall(bytes([4, len(ready)]) + ready)
            while time.monotonic() < ends:
                s.sendall(block)


def _attack(name: str, port: int, seconds: float, **more: Any) -> None:
    ATTACKS[name](port, time.monotonic() + seconds, **more)


@contextlib.contextmanager
def attacked(name: str, port: int, seconds: float, **more: Any) -> Iterator[Callable[[], bool]]:
    """Attack from a process of its own; yields what tells whether it goes on."""
    process = get_context("spawn").Process(target=_attack, args=(name, port, seconds), kwargs=more, daemon=True)
    process.start()
    try:
        yield process.is_alive
    finally:
        process.kill()
        process.join()

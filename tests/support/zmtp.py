"""Raw connections to ZeroMQ sockets, for messages that libzmq would not send."""

from __future__ import annotations

import socket
import struct

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

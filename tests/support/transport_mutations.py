"""Messages that no peer would send: valid ones with bytes, fields, frames and tables changed, and plain garbage."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
from collections.abc import Callable
from typing import Any
from unittest import mock

import msgpack
import numpy as np
import zmq
from transport_tools import CONTRACT, end, shared, step

from serl_chunk.transport.server.control_channel import Published, answer_pull
from serl_chunk.transport.wire import handshake, records, snapshots
from serl_chunk.transport.wire.handshake import PAYLOAD, Hello, StatusRequest
from serl_chunk.transport.wire.records import LOST, encode_part
from serl_chunk.transport.wire.tickets import encode_grant
from serl_chunk.types import Amend, Begin, Grant, Outcome, Snapshot, StepBlock, Ticket
from serl_chunk_robot.wire import codec

Frames = list[bytes]

_VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 0.5, float("nan"),
    float("inf"), "", "a", "x" * 5000, "é\U0001f600\0", b"", b"\0" * 16, b"x" * 1000, [], [0], [[]], [1, 2, 3], {},
    {"a": 1}, {"": {}}, "float32", "uint8", "object", "|O", "bool", "bfloat16", [0, 0], [-1], [2**40], [1] * 9,
]  # fmt: skip


def valid_messages() -> list[Frames]:
    """One of every kind an actor or a learner sends, with its arrays in the table, as frames, and some of each."""
    out: list[Frames] = []
    for inline in (codec.INLINE_BYTES, -1, 20):
        with mock.patch.object(codec, "INLINE_BYTES", inline):
            out += [frames for frames in _one_of_each() if frames not in out]
    return out


def _one_of_each() -> list[Frames]:
    blocks = [StepBlock.from_steps("e", [step(t) for t in range(first, first + n)]) for first, n in ((0, 1), (3, 7))]
    blocks.append(StepBlock.from_steps("e", [shared(step(10)), step(11)]))
    sent = [Begin("e", "task"), *blocks, end("e", 10), Amend("e", Outcome.FAILURE, reward=0.5)]
    hello = Hello("s", 1, "evil", CONTRACT, "run", -1, 0, 5, 0, 3)
    published = Published(Snapshot(3, {"a/w": np.ones((3, 4), np.float32), "b": np.arange(5)}), {"loss": 1.0})
    first, second = (leaf.digest for leaf in published.manifest.leaves)
    ranges = [[first, 0, 48], [second, 0, 40]]
    piece = answer_pull(codec.Message("", {"ranges": ranges}, {}, 0), [published], 1 << 20)
    token = {"token": b"\1" * 16}
    out = [records.encode_record(r, i) for i, r in enumerate(sent)]
    out += [hello.encode(), handshake.refusal("no", retry=True), published.announcement, piece]
    out += [
        StatusRequest("a", CONTRACT).encode(),
        codec.encode(handshake.ECHO, {"number": 1}, {PAYLOAD: np.zeros(9, np.uint8)}),
        encode_grant(Grant((Ticket(0, 1, 2, 3, "push", "seed-4", 5, 6, 7.0),), "wait")),
    ]
    for kind, fields in [
        (handshake.WHO, {"protocol": handshake.PROTOCOL}), (handshake.PING, token), (handshake.BYE, token),
        (handshake.IDENTITY, {"run": "r"}),
        (handshake.TICKETS, {**token, "version": 3, "held": ["0.1.2.3"], "capacity": 4}),
        (handshake.FETCH, {**token, "request": 1, "step": "latest"}), (LOST, {"first": 3, "span": 2, "steps": 1}),
        (handshake.ENROL, {"public": b"\2" * 32}),
        (handshake.ACK, {
            "next": 3, "gap": False, "allowance": None, "allowance_number": 1, "taken": 4, "partial": None,
        }),
        (snapshots.SUBSCRIBE, {**token, "version": 3}), (snapshots.RELEASE, token),
        (snapshots.PULL, {**token, "ranges": [[first, 0, 8]]}), (snapshots.GONE, {"ranges": ranges}),
    ]:  # fmt: skip
        out.append(codec.encode(kind, fields))
    out.append(encode_part(0, 7, out[2], 10, 60))
    return [[bytes(memoryview(f)) for f in frames] for frames in out]


class Mutator:
    """A seeded source of bad messages."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self._valid = valid_messages()

    def message(self) -> Frames:
        """The next one; now and then it is valid."""
        rng = self.rng
        kind = rng.random()
        if kind < 0.04:
            return [rng.randbytes(rng.choice([0, 1, 9, 300])) for _ in range(rng.randrange(4))]
        frames = list(rng.choice(self._valid))
        if kind < 0.55:
            with contextlib.suppress(ValueError, TypeError, OverflowError, msgpack.UnpackException, RecursionError):
                for _ in range(rng.choice([1, 1, 1, 2, 3])):
                    frames[0] = msgpack.packb(self._changed(msgpack.unpackb(frames[0], strict_map_key=False)))
        if kind < 0.08:
            frames[0] = rng.choice(
                [b"\x91" * 3000, b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff"]
            )
        if kind > 0.45:
            for _ in range(rng.choice([1, 1, 2, 8])):
                self._change_frames(frames)
        return frames

    def _changed(self, tree: Any) -> Any:
        """The header with one node replaced, removed, doubled or moved."""
        nodes = list(_nodes(tree))
        parent, key = self.rng.choice(nodes)
        match self.rng.randrange(6):
            case 0 | 1 | 2:
                parent[key] = self.rng.choice(_VALUES)
            case 3:
                del parent[key]
            case 4 if isinstance(parent[key], int) and not isinstance(parent[key], bool):
                parent[key] += self.rng.choice([-1, 1, 1000, -(2**40)])
            case 5:
                other, name = self.rng.choice(nodes)
                parent[key] = other.get(name) if isinstance(other, dict) else other[name] if name < len(other) else 0
            case _ if isinstance(parent, list):
                parent.insert(self.rng.randint(0, len(parent)), parent[key])
        return tree

    def _change_frames(self, frames: Frames) -> None:
        rng = self.rng
        at = rng.randrange(len(frames)) if frames else 0
        match rng.randrange(7):
            case 0 | 1 if frames and frames[at]:
                i = rng.randrange(len(frames[at]))
                frames[at] = frames[at][:i] + bytes([rng.randrange(256)]) + frames[at][i + 1 :]
            case 2 if frames:
                frames[at] = frames[at][: rng.randrange(len(frames[at]) + 1)]
            case 3 if frames:
                i = rng.randrange(len(frames[at]) + 1)
                frames[at] = frames[at][:i] + rng.randbytes(rng.randrange(1, 9)) + frames[at][i:]
            case 4 if frames:
                del frames[at]
            case 5:
                frames.insert(at, rng.randbytes(rng.choice([0, 4, 200])))
            case 6:
                rng.shuffle(frames)


def declared_sizes(frames: Frames) -> list[int]:
    """Bytes there are for each array of a message that was accepted, in the order of its table."""
    rest = iter(frames[1:])
    sizes = [len(row[3] if len(row) == 4 else next(rest)) for row in msgpack.unpackb(frames[0])[2]]
    assert not list(rest)
    return sizes


def _nodes(tree: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every node below `tree`."""
    keys = list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else []
    out: list[tuple[Any, Any]] = []
    for key in keys:
        out.append((tree, key))
        out += _nodes(tree[key])
    return out


class Vandal:
    """A peer of a live learner that sends what comes to its mind, over and over on new connections.

    `token`: returns a token that the learner has given out, for messages that get past the first look.
    """

    def __init__(self, port: int, seed: int, token: Callable[[], bytes] = lambda: b"\1" * 16) -> None:
        self.sent = 0
        self._port, self._token = port, token
        self._mutator = Mutator(seed)
        self._rng = self._mutator.rng
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def visit(self, n: int) -> None:
        """Send `n` messages on one new connection to a random port, read what is answered, and leave."""
        rng, channel = self._rng, self._rng.randrange(3)
        with self._context.socket(zmq.DEALER) as s:
            s.linger, s.sndtimeo, s.rcvtimeo = 200, 2000, 0
            s.connect(f"tcp://127.0.0.1:{self._port + channel}")
            for _ in range(n):
                frames = self._mutator.message()
                if channel == 0 and rng.random() < 0.8:
                    frames.insert(0, rng.choice([self._token(), self._token(), rng.randbytes(16), b""]))
                elif rng.random() < 0.5:
                    frames = self._with_token(frames)
                match rng.randrange(400):
                    case 0:
                        frames.append(b"\0" * (3 << 20))
                    case 1:
                        frames[:1] = [msgpack.packb(["k", {"x": [[]] * 400_000}, []])]
                    case 2:
                        frames += [b""] * 3000
                    case 3:
                        frames[:1] = [b"\x93" * (2 << 20)]
                with contextlib.suppress(zmq.Again):
                    s.send_multipart(frames or [b""])
                    self.sent += 1
                with contextlib.suppress(zmq.Again):
                    s.recv_multipart()

    def _with_token(self, frames: Frames) -> Frames:
        try:
            kind, header, table = msgpack.unpackb(frames[0], strict_map_key=False)
            return [msgpack.packb([kind, {**header, "token": self._token()}, table]), *frames[1:]]
        except (ValueError, TypeError, IndexError, msgpack.UnpackException):
            return frames

    def intrude(self) -> None:
        """Speak TCP with a port: garbage, or the beginnings of ZMTP and then garbage, half a message, or silence."""
        rng = self._rng
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
        ready = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
        openings = [b"", greeting[: rng.randrange(64)], greeting, greeting + ready]
        tails = [
            b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", rng.randbytes(rng.randrange(300)), b"\xff" * 100,
            b"\x01\x05hello" * 50,  # many parts, and never the last
            b"\x03" + struct.pack(">Q", 2**62) + b"x" * 100,  # an announced size
            b"\x02" + struct.pack(">Q", 1 << 40), b"\x00\x7fshort", b"\x04\x05\x04PING", b"\x04\xff" + b"\0" * 40,
        ]  # fmt: skip
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", self._port + rng.randrange(3)), 2) as s,
        ):
            s.sendall(rng.choice([*openings, openings[-1], openings[-1]]) + rng.choice(tails))
            if rng.random() < 0.3:
                s.settimeout(0.05)
                s.recv(1000)
        self.sent += 1

    def close(self) -> None:
        """Leave for good."""
        self._context.destroy(linger=0)

"""Robots that have a line, or have joined, for the tests of keys."""

from __future__ import annotations

from pathlib import Path

import zmq

from serl_chunk.transport.security.keys import ClientKeys, JoinToken
from serl_chunk.transport.security.server import ServerKeys
from serl_chunk_robot.wire import codec
from serl_chunk_robot.wire.codec import Limits
from serl_chunk_robot.wire.curve import Pair, use_keys

HERE = "127.0.0.1"


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


def invited(learner: ServerKeys, folder: Path, name: str = "left", port: int = 1) -> ClientKeys:
    """A robot PC that has taken its line and not used it."""
    line = learner.invite(name, [HERE], port).encode()
    keys = ClientKeys.accept(folder, JoinToken.decode(line))
    keys.save()
    return keys


def joined(learner: ServerKeys, folder: Path, name: str = "left") -> ClientKeys:
    """A robot PC that has joined, without sockets."""
    keys = invited(learner, folder, name)
    assert keys.ticket is not None
    assert learner.enrol(keys.ticket.public, keys.pair.public) == name
    return keys.at([HERE], joined=True)


def tell(port: int, keys: ClientKeys, pair: Pair, *messages: list) -> list[codec.Message]:
    """What the learner answers to messages that come with `pair`."""
    context = zmq.Context()
    s = context.socket(zmq.DEALER)
    try:
        use_keys(s, keys.server, pair)
        s.connect(f"tcp://{HERE}:{port}")
        for frames in messages:
            s.send_multipart(frames)
        answers, wait = [], 5000
        while s.poll(wait):
            answers.append(codec.decode(s.recv_multipart(), Limits(1 << 20, 8)))
            wait = 50
        return answers
    finally:
        context.destroy(linger=0)

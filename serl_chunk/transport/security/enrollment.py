"""Joining: a robot PC hands its public key to the learner that invited it."""

from __future__ import annotations

import contextlib
import time

import zmq

from serl_chunk.config.transport import TransportConfig
from serl_chunk.transport import sockets
from serl_chunk.transport.security.client import (
    Monitor,
    Outcome,
    busy,
    denied,
    explain,
    no_keys_there,
    other_learner,
    use_keys,
)
from serl_chunk.transport.security.keys import ClientKeys, Pair, to_bytes
from serl_chunk.transport.sockets import CHANNELS, try_send
from serl_chunk.transport.wire import codec, handshake, message_types
from serl_chunk.transport.wire.codec import Frame, Limits, WireError
from serl_chunk.transport.wire.handshake import RefusedError, UnreachableError

_CONTROL = CHANNELS.index("control")
_LIMITS = Limits(1 << 16, 1)


class UnencryptedPeerError(RefusedError):
    """The learner uses no keys."""


def enroll(keys: ClientKeys, config: TransportConfig, host: str, port: int, timeout: float) -> ClientKeys:
    """Have the learner at `host:port` write down the key of this machine; returns and saves what is used from now on.

    Does nothing where it has joined. Raises UnreachableError where no learner answers within `timeout` seconds,
    PlainError where it uses no keys, RefusedError where it is another one or the one-time key is not valid (any more).
    """
    where = f"{host}:{port}"
    if keys.ticket is None:
        return keys
    question, refused = codec.encode(message_types.ENROL, {"public": to_bytes(keys.pair.public)}), None
    try:
        outcome = _ask(keys.server, keys.ticket, config, host, port, timeout, question)
    except RefusedError as e:
        outcome, refused = Outcome.DENIED, e
    if outcome is Outcome.DENIED:  # used up: by us, perhaps, and the answer was lost, or by another program here
        outcome = _ask(keys.server, keys.pair, config, host, port, timeout, None)
    outcome = explain(outcome, True, host, port + _CONTROL)
    if outcome is Outcome.DONE:
        return keys.enrolled(host)
    if outcome is Outcome.DENIED:
        raise refused or RefusedError(denied(keys, where))
    if outcome is Outcome.BUSY:
        raise UnreachableError(busy(where))
    if outcome is Outcome.MISMATCH:
        raise UnencryptedPeerError(no_keys_there(keys, where))
    if outcome is Outcome.OTHER:
        raise RefusedError(other_learner(keys, where))
    raise UnreachableError(f"no learner answers at {where}")


def _ask(
    server: str, pair: Pair, config: TransportConfig, host: str, port: int, timeout: float, question: list[Frame] | None
) -> Outcome | None:
    """Connect with a key and, once that is accepted, ask; DONE where all went well, None without an answer in time.

    BUSY where the learner could not check the key in that time. A connection that was closed is tried again: CLOSED is
    what it comes to where that never helps.
    """
    deadline = time.monotonic() + timeout
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    s = sockets.make_socket(context, zmq.DEALER, config)
    use_keys(s, server, pair)
    with contextlib.ExitStack() as stack:
        stack.callback(context.destroy, linger=0)
        monitor = Monitor(s)
        stack.callback(monitor.close)
        sockets.connect(s, host, port + _CONTROL)
        poller = zmq.Poller()
        poller.register(s, zmq.POLLIN)
        poller.register(monitor.socket, zmq.POLLIN)
        closed, cannot_say = 0, False
        while (left := deadline - time.monotonic()) > 0:
            poller.poll(round(1000 * left))
            outcomes = monitor.read()
            outcome = outcomes[-1] if outcomes else None
            closed += outcomes.count(Outcome.CLOSED)
            cannot_say = cannot_say or Outcome.BUSY in outcomes
            if outcome in (Outcome.DENIED, Outcome.MISMATCH) or closed > 1:
                return outcome
            if outcome is Outcome.DONE and question is None:
                return outcome
            if outcome is Outcome.DONE and question is not None:
                s.poll(round(1000 * max(0.0, deadline - time.monotonic())), zmq.POLLOUT)
                try_send(s, question)
            if s.poll(0, zmq.POLLIN):
                return _answer(s)
    return Outcome.BUSY if cannot_say else None


def _answer(s: zmq.Socket[bytes]) -> Outcome | None:
    try:
        message = codec.decode(s.recv_multipart(copy=False), _LIMITS)
        if message.kind == handshake.REFUSED:
            raise RefusedError(codec.text(message.header, "reason", 1 << 12))
    except WireError:
        return None
    return Outcome.DONE if message.kind == message_types.ENROLLED else None

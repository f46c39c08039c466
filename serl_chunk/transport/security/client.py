"""The actor's side of the keys: their use by sockets, the reasons of failed key exchanges, and joining."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import socket
import time
from typing import NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

from serl_chunk.config.transport import TransportConfig
from serl_chunk.transport.security.keys import ClientKeys
from serl_chunk.transport.wire import handshake
from serl_chunk.transport.wire.handshake import RefusedError, UnreachableError
from serl_chunk_robot.wire import codec, sockets
from serl_chunk_robot.wire.codec import Frame, Limits, WireError
from serl_chunk_robot.wire.curve import default_folder, fingerprint, to_bytes, use_keys
from serl_chunk_robot.wire.sockets import is_loopback, try_send

HANDSHAKE_EVENTS = (  # of a socket's monitor, the only place where libzmq reports a refused key
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)
_DENIED = 400  # what the learner's authenticator answers to a key it does not let in
_GREETING_S = 1.0
_RETRY_S = 1.0  # between attempts that failed: each costs the learner a handshake
_ADD = "Run `serl-chunk keys add NAME` on the learner's machine, and paste the line it prints here"
_SURE = 2  # times a wrong key is seen before it is believed: a learner that ends now looks the same once


class Outcome(enum.Enum):
    """The result of a socket's newest handshake."""

    DONE = enum.auto()
    DENIED = enum.auto()  # the learner does not admit this key
    BUSY = enum.auto()  # it cannot check the key now
    MISMATCH = enum.auto()  # one side uses keys, the other does not
    CLOSED = enum.auto()  # the other side hung up; `explain` finds the reason
    OTHER = enum.auto()  # another learner, which cannot decrypt what is sent
    FOREIGN = enum.auto()  # another protocol


def outcome_of(event: int, value: int) -> Outcome:
    """Return the meaning of one of HANDSHAKE_EVENTS."""
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return Outcome.DENIED if value == _DENIED else Outcome.BUSY
    if event in (zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL):
        return Outcome.DONE if event == zmq.EVENT_HANDSHAKE_SUCCEEDED else Outcome.CLOSED
    return Outcome.MISMATCH if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH else Outcome.FOREIGN


def mechanism_at(host: str, port: int, timeout: float = _GREETING_S) -> str | None:
    """Return the mechanism that a listener requires: "CURVE", "NULL", or None for no ZeroMQ peer."""
    greeting = b""
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout) as s:
        s.settimeout(timeout)
        s.sendall(b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01")  # signature and version: enough to be greeted in full
        while len(greeting) < 64 and (more := s.recv(64 - len(greeting))):
            greeting += more
    if len(greeting) < 64 or greeting[0] != 0xFF or greeting[9] != 0x7F:
        return None
    return greeting[12:32].rstrip(b"\0").decode("ascii", "replace")


def explain(outcome: Outcome | None, secured: bool, host: str, port: int) -> Outcome | None:
    """Return an outcome with the reason for CLOSED; None where the other side just went away. `secured`: with keys."""
    if outcome is not Outcome.CLOSED:
        return outcome
    spoken = mechanism_at(host, port)
    if spoken is None or (spoken == "NULL" and not secured):
        return None
    return Outcome.OTHER if spoken == "CURVE" and secured else Outcome.MISMATCH


class ConnectionFault(NamedTuple):
    """The reason why no connection came about."""

    sentence: str
    final: bool  # waiting does not help
    retry_in: float = _RETRY_S  # seconds


class KeyExchange:
    """The keys on an actor's sockets, one connection after another. Used by the network thread.

    On loopback the learner decides whether keys are used, unless they are binding.
    """

    def __init__(self, keys: ClientKeys | None, host: str, port: int) -> None:
        self._keys = keys
        self.move(host, port)
        self.monitor: zmq.Socket[bytes] | None = None  # to poll for reading
        self._watched: zmq.Socket[bytes] | None = None  # what it monitors

    def connect(
        self, context: zmq.Context[zmq.Socket[bytes]], config: TransportConfig, channel: str
    ) -> zmq.Socket[bytes]:
        """Connect a socket with these keys. `trouble` is about the one of the control channel, until `close`."""
        s = sockets.make_socket(context, zmq.DEALER, config.max_message_bytes)
        if self._keys is not None and not self._plain:
            use_keys(s, self._keys.server, self._keys.pair)
        if channel == "control":
            self._watched, self.monitor = s, s.get_monitor_socket(HANDSHAKE_EVENTS)
            self.monitor.linger = 0
        sockets.connect(s, self._host, self._port)
        return s

    def move(self, host: str, port: int) -> None:
        """Connect the next sockets to another place, where nothing is agreed on yet."""
        self._host, self._port = host, port
        self._plain = self._keys is None
        self._others = 0  # wrong keys of the learner's, seen in a row

    def outcomes(self) -> list[Outcome]:
        found = []
        while self.monitor is not None and self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)
            found.append(outcome_of(int(event["event"]), int(event["value"])))
        return found

    def trouble(self, *, known: bool) -> ConnectionFault | None:
        """Return why the newest attempt failed; None where none did. The sockets must be opened again then.

        `known`: this actor was connected before. A learner that was right once may be so again, and is waited for.
        """
        newest = [None, *self.outcomes()][-1]
        outcome = explain(newest, not self._plain, self._host, self._port)
        where, keys = f"{self._host}:{self._port}", self._keys
        if outcome is Outcome.DONE:
            self._others = 0
        if outcome in (None, Outcome.DONE) or (keys is None and outcome in (Outcome.DENIED, Outcome.OTHER)):
            return None
        if outcome is Outcome.MISMATCH and keys is not None and is_loopback(self._host) and not keys.binding:
            self._plain = not self._plain
            return ConnectionFault(f"the learner at {where} does not agree on keys", False, retry_in=0.1)
        self._others += outcome is Outcome.OTHER
        final = outcome is Outcome.DENIED
        if outcome in (Outcome.MISMATCH, Outcome.OTHER) and not known:
            final = outcome is Outcome.MISMATCH or self._others >= _SURE
        return ConnectionFault(sentence(outcome, keys, where), final)

    def close(self) -> None:
        if self._watched is not None and not self._watched.closed:
            self._watched.disable_monitor()
        if self.monitor is not None:
            self.monitor.close()
        self.monitor = self._watched = None


def sentence(outcome: Outcome | None, keys: ClientKeys | None, where: str) -> str:
    """Return what failed between this machine and `where`, and the remedy."""
    if outcome is Outcome.BUSY:
        return f"the learner at {where} cannot check keys now. Its own output has the reason"
    if outcome is Outcome.MISMATCH and keys is None:
        return (
            f"the learner at {where} requires a key, and this machine has none (in {default_folder()}, or the folder "
            f"of `keys`) or runs with `insecure`. {_ADD}, or leave `insecure` out"
        )
    if outcome is Outcome.MISMATCH and keys is not None:
        return (
            f"the learner at {where} runs without keys, so that any machine could pretend to be it, and this machine "
            f"has one for it ({keys.file}). Start that learner without `insecure`, or this program with it"
        )
    if outcome is Outcome.DENIED and keys is not None:
        unused = ", its line was used by another machine or is older than ten minutes," if keys.ticket else ""
        return (
            f"the learner at {where} refuses this machine's key {keys.name!r} ({fingerprint(keys.pair.public)}): "
            f"it was revoked,{unused} or the learner uses another key folder. {_ADD}"
        )
    if outcome is Outcome.OTHER and keys is not None:
        return (
            f"what answers at {where} is not the learner that this machine joined (key {fingerprint(keys.server)}, "
            f"{keys.file}): it is another one, or its keys were made anew. Where several were joined from here, "
            f"`ip` with the line ties it to that address. {_ADD}, if it is the right one"
        )
    return f"what answers at {where} is no learner"


_LIMITS = Limits(1 << 16, 1)


class UnencryptedPeerError(RefusedError):
    """The learner uses no keys."""


def enroll(keys: ClientKeys, config: TransportConfig, host: str, port: int, timeout: float) -> ClientKeys:
    """Have a learner write down the key of this machine, unless it did; returns and saves the keys to use then.

    Raises UnreachableError where no learner answers within `timeout` seconds, UnencryptedPeerError where it uses no
    keys, RefusedError where it is another one or the one-time key is not valid.
    """
    where = f"{host}:{port}"
    if keys.ticket is None:
        return keys
    request, refused = codec.encode(handshake.ENROL, {"public": to_bytes(keys.pair.public)}), None
    try:
        outcome = _ask(dataclasses.replace(keys, pair=keys.ticket), config, host, port, timeout, request)
    except RefusedError as e:
        outcome, refused = Outcome.DENIED, e
    if outcome is Outcome.DENIED:  # used up: by us, perhaps, and the answer was lost, or by another program here
        outcome = _ask(keys, config, host, port, timeout, None)
    outcome = explain(outcome, True, host, port)
    if outcome is Outcome.DONE:
        return keys.at([host], joined=True)
    if outcome in (None, Outcome.FOREIGN):
        raise UnreachableError(f"no learner answers at {where}")
    if outcome is Outcome.DENIED and refused is not None:
        raise refused
    kind = {Outcome.BUSY: UnreachableError, Outcome.MISMATCH: UnencryptedPeerError}.get(outcome, RefusedError)
    raise kind(sentence(outcome, keys, where))


def _ask(
    keys: ClientKeys, config: TransportConfig, host: str, port: int, timeout: float, request: list[Frame] | None
) -> Outcome | None:
    """Connect with a key and, once it is accepted, send a request.

    Returns DONE for success, None for no answer in time, BUSY where the learner could not check the key in that time.
    """
    deadline = time.monotonic() + timeout
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    exchange = KeyExchange(keys, host, port)
    with contextlib.ExitStack() as stack:
        stack.callback(context.destroy, linger=0)
        stack.callback(exchange.close)
        s = exchange.connect(context, config, "control")
        poller = zmq.Poller()
        poller.register(s, zmq.POLLIN)
        poller.register(exchange.monitor, zmq.POLLIN)
        closed, busy = 0, False
        while (left := deadline - time.monotonic()) > 0:
            poller.poll(round(1000 * left))
            outcomes = exchange.outcomes()
            outcome = outcomes[-1] if outcomes else None
            closed += outcomes.count(Outcome.CLOSED)
            busy = busy or Outcome.BUSY in outcomes
            if outcome in (Outcome.DENIED, Outcome.MISMATCH) or closed > 1:
                return outcome
            if outcome is Outcome.DONE:
                if request is None:
                    return outcome
                s.poll(round(1000 * max(0.0, deadline - time.monotonic())), zmq.POLLOUT)
                try_send(s, request)
            if s.poll(0, zmq.POLLIN):
                with contextlib.suppress(WireError):
                    message = handshake.admitted(codec.decode(s.recv_multipart(copy=False), _LIMITS))
                    return Outcome.DONE if message.kind == handshake.ENROLLED else None
                return None
    return Outcome.BUSY if busy else None

"""Connections of `serl-chunk doctor` to a learner: its port, and its answers."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import socket
import threading
import time
from typing import Literal, NamedTuple

import numpy as np
import zmq

from serl_chunk.config.transport import TransportConfig
from serl_chunk.transport.security.client import KeyExchange, mechanism_at
from serl_chunk.transport.security.keys import ClientKeys
from serl_chunk.transport.wire import handshake
from serl_chunk.transport.wire.handshake import (
    ActorState,
    LearnerStatus,
    RefusedError,
    StatusRequest,
    UnreachableError,
)
from serl_chunk_robot.wire import codec
from serl_chunk_robot.wire.codec import Frame, Limits, Message, WireError
from serl_chunk_robot.wire.sockets import try_receive, try_send

Trouble = Literal["", "no host", "refused", "timeout", "no greeting", "unreachable"]


class PortProbe(NamedTuple):
    """The result of connecting to a learner's port."""

    trouble: Trouble  # empty where a learner may listen there
    detail: str  # the system's words for it
    seconds: float  # to connect, name look-up included


def probe_port(host: str, port: int, timeout: float) -> PortProbe:
    """Connect, in at most `timeout` seconds. A tunnel accepts connections that lead nowhere: it must greet too."""
    found = PortProbe("timeout", f"no answer in {timeout:g} s", timeout)

    def probe() -> None:
        nonlocal found
        start = time.monotonic()
        trouble, detail = _connect(host, port, timeout / 2)
        seconds = time.monotonic() - start
        if not trouble and mechanism_at(host, port, timeout / 2) is None:
            trouble, detail = "no greeting", "it accepts connections and does not greet"
        found = PortProbe(trouble, detail, seconds)

    # A daemon: the system's look-up of a name can take longer than the operator waits, and cannot be stopped.
    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(timeout)
    return found


def _connect(host: str, port: int, timeout: float) -> tuple[Trouble, str]:
    try:
        socket.create_connection((host, port), timeout).close()
    except UnicodeError as e:  # no name of a host can be like that
        return "no host", str(e)
    except TimeoutError:
        return "timeout", f"no answer in {timeout:g} s"
    except OSError as e:
        kind: Trouble = "refused" if e.errno == errno.ECONNREFUSED else "unreachable"
        return "no host" if isinstance(e, socket.gaierror) else kind, e.strerror or str(e)
    return "", ""


MAX_ECHOES = 128  # of one measurement: at most 128 MiB
_LIMITS = Limits(1 << 20, 1)
_FIRST_BYTES = 1 << 14  # of an echo; they grow while they are quick, so that a slow link is measured too
_QUICK_S = 0.1
_AGAIN_S = 0.5
_WINDOW = 4  # echoes under way
_RAMP = 0.3  # of the measured time that does not count, while the echoes grow


class KeyRefusedError(RefusedError):
    """No connection came about because of keys, and waiting does not help."""


class RoundTrip(NamedTuple):
    """One round trip."""

    seconds: float
    offset: float  # seconds that the learner's clock is ahead of this machine's, half a trip more or less


class DiagnosticsClient:
    """Sends probes to a learner. Used by one thread; close it."""

    def __init__(self, config: TransportConfig, host: str, port: int, keys: ClientKeys | None) -> None:
        self._config, self._where = config, f"{host}:{port}"
        self._exchange = KeyExchange(keys, host, port)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._number = 0  # of the newest echo

    def identify(self, timeout: float) -> str:
        """Connect, and return the learner's run. Raises KeyRefusedError, RefusedError (protocol), UnreachableError."""
        who = codec.encode(handshake.WHO, {"protocol": handshake.PROTOCOL})
        return codec.text(self._request(who, handshake.IDENTITY, timeout).header, "run", 128)

    @property
    def secured(self) -> bool:
        return self._socket is not None and self._socket.getsockopt(zmq.MECHANISM) == zmq.CURVE

    def inspect(self, request: StatusRequest, timeout: float) -> LearnerStatus:
        """Return the learner's status. Raises UnreachableError without an answer, RefusedError."""
        message = self._request(request.encode(), handshake.FINDINGS, timeout, again=_AGAIN_S)
        try:
            return LearnerStatus.decode(message)
        except WireError as e:
            raise UnreachableError(f"the learner's answer cannot be read: {e}") from e

    def actors(self, timeout: float) -> list[ActorState]:
        """Return the actors that the learner knows. Raises UnreachableError without an answer, RefusedError."""
        message = self._request(codec.encode(handshake.ACTORS, {}), handshake.ACTOR_STATES, timeout, again=_AGAIN_S)
        try:
            return ActorState.decode_all(message)
        except WireError as e:
            raise UnreachableError(f"the learner's answer cannot be read: {e}") from e

    def round_trips(self, n: int, timeout: float) -> list[RoundTrip]:
        """Make up to `n` round trips, one after another, in at most `timeout` seconds. Raises RefusedError."""
        trips: list[RoundTrip] = []
        deadline = time.monotonic() + timeout
        with contextlib.suppress(UnreachableError, WireError):
            for _ in range(n):
                began, start = time.time(), time.monotonic()
                message = self._request(self._echo(0), handshake.ECHOED, deadline - start)
                seconds = time.monotonic() - start
                trips.append(RoundTrip(seconds, handshake.Echo.decode(message).clock - (began + seconds / 2)))
        return trips

    def throughput(self, seconds: float) -> tuple[float, int]:
        """Measure bytes per second to the learner, and the bytes that arrived. Raises RefusedError."""
        s = self._socket
        assert s is not None, "identify first"
        data = np.frombuffer(os.urandom(handshake.MAX_ECHO_BYTES), np.uint8)  # nothing on the way can compress it
        size = min(_FIRST_BYTES, self._config.max_message_bytes // 2)
        largest = min(handshake.MAX_ECHO_BYTES, self._config.max_message_bytes // 2)
        under_way: dict[int, tuple[float, int]] = {}  # number -> when it was sent, bytes
        start = now = time.monotonic()
        arrived: list[tuple[float, int]] = [(start, 0)]  # time, bytes so far
        sent, quickest = 0, float("inf")
        while now - start < seconds and (sent < MAX_ECHOES or under_way):
            while sent < MAX_ECHOES and len(under_way) < _WINDOW and try_send(s, self._echo(size, data)):
                under_way[self._number] = time.monotonic(), size
                sent += 1
            more = sent < MAX_ECHOES and len(under_way) < _WINDOW
            s.poll(round(1000 * min(0.05, seconds)), zmq.POLLIN | zmq.POLLOUT if more else zmq.POLLIN)
            now = time.monotonic()
            while (message := self._receive()) is not None:
                with contextlib.suppress(WireError, KeyError):
                    if message.kind != handshake.ECHOED:
                        continue
                    began, nbytes = under_way.pop(handshake.Echo.decode(message).number)
                    arrived.append((now, arrived[-1][1] + nbytes))
                    quickest = min(quickest, now - began)
                    if now - began < _QUICK_S + 2 * quickest:
                        size = min(2 * size, largest)
        return _rate(arrived), arrived[-1][1]

    def close(self) -> None:
        self._drop()
        self._context.destroy(linger=0)

    def _drop(self) -> None:
        self._exchange.close()
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    def _echo(self, nbytes: int, data: np.ndarray | None = None) -> list[Frame]:
        self._number += 1
        arrays = {} if data is None else {handshake.PAYLOAD: data[:nbytes]}
        return codec.encode(handshake.ECHO, {"number": self._number}, arrays)

    def _request(self, request: list[Frame], kind: str, timeout: float, again: float = math.inf) -> Message:
        """Return the answer to a request, sent every `again` seconds: a learner drops what exceeds its limit."""
        first, number = kind == handshake.IDENTITY, self._number  # of an echo, so that no late answer is taken
        why = f"the learner at {self._where} did not answer"
        why = f"something listens at {self._where} but does not answer as a learner" if first else why
        deadline, send_at = time.monotonic() + timeout, 0.0
        while (now := time.monotonic()) < deadline:
            if self._socket is None:
                self._socket, send_at = self._exchange.connect(self._context, self._config, "control"), 0.0
            due = now >= send_at
            if due and try_send(self._socket, request):
                due, send_at = False, now + again
            wait = min(0.1, (deadline if due else min(deadline, send_at)) - now)
            self._socket.poll(max(1, round(1000 * wait)), zmq.POLLIN | zmq.POLLOUT if due else zmq.POLLIN)
            trouble = self._exchange.trouble(known=False) if first else None
            if trouble is not None:
                if trouble.final:
                    raise KeyRefusedError(trouble.sentence)
                why = trouble.sentence
                self._drop()
                time.sleep(max(0.0, min(trouble.retry_in, deadline - time.monotonic())))
                continue
            while (message := self._receive()) is not None:
                if message.kind == kind and (kind != handshake.ECHOED or message.header.get("number") == number):
                    return message
        raise UnreachableError(why)

    def _receive(self) -> Message | None:
        """Return the next message; None where there is none. Raises RefusedError for a refusal, UnreachableError."""
        assert self._socket is not None, "identify first"
        frames = try_receive(self._socket)
        if frames is None:
            return None
        try:
            return handshake.admitted(codec.decode(frames, _LIMITS))
        except WireError as e:
            raise UnreachableError(f"what answers at {self._where} is no learner ({e})") from e


def _rate(arrived: list[tuple[float, int]]) -> float:
    """Return bytes per second of (time, bytes so far), the first being (start, 0); 0 where nothing arrived."""
    if len(arrived) == 1:
        return 0.0
    (start, _), (end, total) = arrived[0], arrived[-1]
    at, before = next((a for a in arrived if a[0] >= start + _RAMP * (end - start)), arrived[0])
    if at >= end:  # one answer, or all at once
        at, before = start, 0
    return (total - before) / max(end - at, 1e-9)

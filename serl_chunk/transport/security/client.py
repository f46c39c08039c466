"""How an actor's sockets use its keys, and what it means when the key exchange fails.

libzmq tells neither `send` nor `recv` of a refused key: only a socket's monitor does, and not in words.
"""

from __future__ import annotations

import contextlib
import enum
import socket
from typing import NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

from serl_chunk.transport.security.keys import ClientKeys, Pair, default_folder, fingerprint
from serl_chunk.transport.sockets import is_loopback

HANDSHAKE_EVENTS = (  # of a socket's monitor
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)
_DENIED = 400  # what the learner's authenticator answers to a key it does not let in
_GREETING_S = 1.0
_RETRY_S = 1.0  # between attempts that failed: each costs the learner a handshake
_SURE = 2  # times a wrong key is seen before it is believed: a learner that ends now looks the same once


class Outcome(enum.Enum):
    """What became of the newest handshake of a socket."""

    DONE = enum.auto()
    DENIED = enum.auto()  # the learner does not let this key in
    BUSY = enum.auto()  # it cannot say now
    MISMATCH = enum.auto()  # one side uses keys, the other does not
    CLOSED = enum.auto()  # the other side hung up, and `explain` finds out why
    OTHER = enum.auto()  # it is another learner: it cannot read what we say
    FOREIGN = enum.auto()  # not spoken by anything of ours


class Monitor:
    """The outcomes of a socket's handshakes. Used by the thread that owns the socket; close it before the socket."""

    def __init__(self, s: zmq.Socket[bytes]) -> None:
        self._owner = s
        self.socket = s.get_monitor_socket(HANDSHAKE_EVENTS)
        self.socket.linger = 0

    def read(self) -> list[Outcome]:
        """What became of the handshakes since the last call, the newest last."""
        found = []
        while self.socket.poll(0):
            event = recv_monitor_message(self.socket)
            found.append(outcome_of(int(event["event"]), int(event["value"])))
        return found

    def close(self) -> None:
        """Stop watching."""
        if not self._owner.closed:
            self._owner.disable_monitor()
        self.socket.close()


def outcome_of(event: int, value: int) -> Outcome:
    """What one of HANDSHAKE_EVENTS means."""
    if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
        return Outcome.DONE
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return Outcome.DENIED if value == _DENIED else Outcome.BUSY
    if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
        return Outcome.CLOSED
    mismatch = value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
    return Outcome.MISMATCH if mismatch else Outcome.FOREIGN


def use_keys(s: zmq.Socket[bytes], server: str, pair: Pair) -> None:
    """Make a socket that is not connected yet prove `pair` and accept only the learner with the key `server`."""
    s.curve_serverkey = server.encode()
    s.curve_publickey = pair.public.encode()
    s.curve_secretkey = pair.secret.encode()


def mechanism_at(host: str, port: int, timeout: float = _GREETING_S) -> str | None:
    """Mechanism that the listener there requires: "CURVE", "NULL", or None for no ZeroMQ peer."""
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
    """An outcome at the actor's side, with the reason for CLOSED; None where the other side just went away.

    Where both sides notice that they do not fit, the side that hangs up first leaves the other one without a reason.

    Args:
        secured: whether keys were used.
    """
    if outcome is not Outcome.CLOSED:
        return outcome
    spoken = mechanism_at(host, port)
    if spoken is None or (spoken == "NULL" and not secured):
        return None
    return Outcome.OTHER if spoken == "CURVE" and secured else Outcome.MISMATCH


class ConnectionFault(NamedTuple):
    """Why a connection did not come about."""

    sentence: str
    final: bool  # waiting does not help
    retry_in: float = _RETRY_S  # seconds


class KeyExchange:
    """The keys on an actor's sockets, one connection after another. Used by the network thread.

    On loopback the learner decides: keys are shown where it asks for them, and left out where it does not, unless they
    are binding.
    """

    def __init__(self, keys: ClientKeys | None, host: str, port: int) -> None:
        self._keys, self._host, self._port = keys, host, port
        self._plain = keys is None
        self._others = 0  # wrong keys of the learner's, seen in a row
        self._monitor: Monitor | None = None

    def secure(self, s: zmq.Socket[bytes]) -> None:
        """Call it before the socket connects."""
        if self._keys is not None and not self._plain:
            use_keys(s, self._keys.server, self._keys.pair)

    def watch(self, s: zmq.Socket[bytes]) -> None:
        """`trouble` is about this socket, from before it connects until `close`."""
        self._monitor = Monitor(s)

    @property
    def monitor(self) -> zmq.Socket[bytes] | None:
        """What to poll for reading."""
        return None if self._monitor is None else self._monitor.socket

    def trouble(self, *, known: bool) -> ConnectionFault | None:
        """Why the newest attempt failed; None where none did. The sockets must be opened again then.

        `known`: this actor was connected before. A learner that was right once may be so again, and is waited for.
        """
        outcomes = [] if self._monitor is None else self._monitor.read()
        outcome = explain(outcomes[-1] if outcomes else None, not self._plain, self._host, self._port)
        where = f"{self._host}:{self._port}"
        if outcome is Outcome.DONE:
            self._others = 0
        elif outcome is Outcome.DENIED and self._keys is not None:
            return ConnectionFault(denied(self._keys, where), True)
        elif outcome is Outcome.BUSY:
            return ConnectionFault(busy(where), False)
        elif outcome is Outcome.MISMATCH and self._keys is None:
            return ConnectionFault(no_key(where), not known)
        elif outcome is Outcome.MISMATCH and self._keys is not None:
            if is_loopback(self._host) and not self._keys.binding:
                self._plain = not self._plain
                return ConnectionFault(f"the learner at {where} does not agree on keys", False, retry_in=0.1)
            return ConnectionFault(no_keys_there(self._keys, where), not known)
        elif outcome is Outcome.FOREIGN:
            return ConnectionFault(f"what answers at {where} is no learner", False)
        elif outcome is Outcome.OTHER and self._keys is not None:
            self._others += 1
            return ConnectionFault(other_learner(self._keys, where), not known and self._others >= _SURE)
        return None

    def close(self) -> None:
        """Before the watched socket is closed."""
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None


def denied(keys: ClientKeys, where: str) -> str:
    """The learner does not let this machine's key in."""
    unused = ", its line was used by another machine or is older than ten minutes," if keys.ticket else ""
    return (
        f"the learner at {where} does not know this machine's key {keys.name!r} ({fingerprint(keys.pair.public)}): "
        f"it was revoked,{unused} or the learner uses another key folder. On the learner's machine run "
        f"`serl-chunk keys add NAME`, and paste the line it prints here"
    )


def busy(where: str) -> str:
    """The learner could not look into its key folder."""
    return f"the learner at {where} cannot check keys now: its own output says why"


def no_key(where: str) -> str:
    """The learner asks for a key and this machine has none."""
    return (
        f"the learner at {where} talks only to machines with a key, and this one has none (in "
        f"{default_folder()}, or where --keys says), or was started with --insecure. On the learner's machine run "
        "`serl-chunk keys add NAME`, and paste the line it prints here; where that was done, leave --insecure out"
    )


def no_keys_there(keys: ClientKeys, where: str) -> str:
    """This machine has a key and the peer that answers does not ask for one."""
    return (
        f"the learner at {where} runs without keys, so that any machine could pretend to be it, and this machine has "
        f"one for it ({keys.file}). Start that learner without --insecure, or this program with --insecure"
    )


def other_learner(keys: ClientKeys, where: str) -> str:
    """The peer that answers does not have the learner's key."""
    return (
        f"what answers at {where} is not the learner that this machine joined (key {fingerprint(keys.server)}, "
        f"{keys.file}): it is another one, or its keys were made anew. If it is the one you mean, run "
        "`serl-chunk keys add NAME` on its machine, and paste the line it prints here (where several learners were "
        "joined from here, --ip HOST with the line ties it to that address)"
    )

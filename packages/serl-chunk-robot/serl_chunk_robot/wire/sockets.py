"""ZeroMQ sockets with every limit set, and the wake-up of a polling thread. A socket belongs to one thread."""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import socket
import threading
from typing import Sequence

import zmq

from serl_chunk_robot.errors import ConfigError
from serl_chunk_robot.wire.codec import MAX_HEADER_BYTES, Frame

COPY_BELOW = 65536  # bytes; libzmq's zero-copy bookkeeping costs more than copying less than this
_NOBLOCK, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)  # combining them takes a microsecond each time
# A peer whose machine is gone is dropped after so long, by the system's own probes and resends. libzmq's heartbeats
# would not do: on a slow link they wait behind a message, and the connection would be cut in the middle of it.
_DEAD_PEER_S = 60
HIGH_WATER = 256  # messages queued per peer and direction (libzmq's default of 1000 would be 295 MB of camera rows)
_HANDSHAKE_MS = 4000  # libzmq's default of 30 s allows a silent peer to hold a connection that long


def make_socket(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, max_message_bytes: int, max_frame_bytes: int | None = None
) -> zmq.Socket[bytes]:
    """Make a ROUTER or DEALER that never blocks on close, never queues without bound and notices a dead peer.

    A peer that sends a larger frame is disconnected; by default one may be as large as a message.
    """
    s = context.socket(kind)
    s.linger = 0  # the default waits for ever when the context ends
    s.sndhwm = s.rcvhwm = HIGH_WATER
    # Of one frame; the decoder checks the sum. A server that strangers reach must also limit incomplete messages.
    s.maxmsgsize = max_frame_bytes or max(max_message_bytes, MAX_HEADER_BYTES)
    s.handshake_ivl = _HANDSHAKE_MS
    s.setsockopt(zmq.IPV6, 1)
    s.setsockopt(zmq.TCP_KEEPALIVE, 1)
    s.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _DEAD_PEER_S // 3)
    s.setsockopt(zmq.TCP_KEEPALIVE_INTVL, _DEAD_PEER_S // 6)
    s.setsockopt(zmq.TCP_MAXRT, 1000 * _DEAD_PEER_S)
    if kind == zmq.ROUTER:
        s.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an absent peer is an error to count, not a silent drop
    else:
        s.setsockopt(zmq.IMMEDIATE, 1)  # nothing is queued for a peer that is not there
        s.setsockopt(zmq.RECONNECT_IVL, 100)
        s.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    return s


def try_send(s: zmq.Socket[bytes], frames: Sequence[Frame]) -> bool:
    """Send one message without blocking; False where no peer takes it now (nothing was sent then).

    Large frames are not copied: their memory must not change afterwards.
    """
    last = len(frames) - 1
    sent = True
    for i, frame in enumerate(frames):
        flags = _MORE if i < last else _NOBLOCK
        copy = not isinstance(frame, memoryview) or frame.nbytes < COPY_BELOW
        try:
            s.send(frame, flags, copy=copy)
        except zmq.ZMQError as e:
            if e.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            if i == 0:
                return False
            # The connection broke in the middle. libzmq discards the message, but must still be given its rest: else
            # the next message would be taken for that rest.
            sent = False
    return sent


def try_receive(s: zmq.Socket[bytes]) -> list[zmq.Frame] | None:
    """Return the next message; None where there is none. As `recv_multipart`, in half its time."""
    try:
        frames = [s.recv(_NOBLOCK, copy=False)]
    except zmq.Again:
        return None
    while frames[-1].more:  # the rest of a message has come with its first frame
        frames.append(s.recv(copy=False))
    return frames


def descriptor_of(frame: zmq.Frame) -> int:
    """Return the file descriptor of the connection that a received frame came over; -1 for none."""
    try:
        return int(frame.get("__fd"))
    except zmq.ZMQError:
        return -1


def endpoint(host: str, port: int) -> str:
    """Return `tcp://host:port`, with the brackets that an IPv6 address needs."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def bind(s: zmq.Socket[bytes], host: str, port: int) -> None:
    """Bind a socket to `port` of `host`. Raises ConfigError for an address that is not there or in use."""
    try:
        s.bind(endpoint(host, port))
    except zmq.ZMQError as e:
        raise ConfigError(f"{host}:{port} cannot be served: {e.strerror}. Set another port, or end its user.") from e


def connect(s: zmq.Socket[bytes], host: str, port: int) -> None:
    """Connect a socket to `port` of `host`. Raises ConfigError for what cannot be a host.

    libzmq tries one address of a name, the IPv6 one where that is allowed: a peer that listens on IPv4 is then not
    found under a name that has both.
    """
    s.setsockopt(zmq.IPV6, 0)
    if families := _families(host):  # else unknown now; libzmq tries again
        s.setsockopt(zmq.IPV6, socket.AF_INET not in families)
    try:
        s.connect(endpoint(host, port))
    except zmq.ZMQError as e:
        raise ConfigError(f"{host!r} is no host ({e.strerror}). Give a name or IP address alone") from e


def unknown_host(host: str) -> str:
    """Return that no address has the name `host`, with the reason and a remedy; "" where one has."""
    try:
        if host not in _known:
            _look_up(host)
    except (OSError, UnicodeError) as e:  # the second: no name of a host can be like that
        return "no such host: {!r} ({}). Give its name or IP address".format(
            host, getattr(e, "strerror", None) or "no name is like that"
        )
    return ""


_known: dict[str, set[int]] = {}  # host -> kinds of its addresses, as of the newest look-up that had an answer
_asking = threading.Lock()
_LOOK_UP_S = 0.5  # that a connection waits for the first answer


def _families(host: str) -> set[int]:
    """Return the kinds of a host's addresses, empty for unknown yet. One that moved: see the next connection."""
    if _asking.acquire(blocking=False):  # while the network is away a look-up may take many seconds
        thread = threading.Thread(target=_look_up_again, args=(host,), daemon=True)
        thread.start()
        if host not in _known:
            thread.join(_LOOK_UP_S)
    return _known.get(host, set())


def _look_up(host: str) -> None:
    _known[host] = {info[0] for info in socket.getaddrinfo(host, None)}


def _look_up_again(host: str) -> None:
    with contextlib.suppress(OSError, UnicodeError):
        _look_up(host)
    _asking.release()


def is_loopback(bind: str) -> bool:
    """Whether a bind address is reachable from this machine only."""
    with contextlib.suppress(ValueError):  # a host or interface name, or "*": assume the worst
        return bind == "localhost" or ipaddress.ip_address(bind).is_loopback
    return False


_send = ctypes.PyDLL(None).send  # the system's; unlike socket.send it is called without releasing the interpreter
_send.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
_send.restype = ctypes.c_ssize_t
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)


class Waker:
    """Wakes the thread that polls `fileno()`; `wake` may be called from any thread and never blocks.

    The woken thread calls `drain` first and then looks for work; a `wake` before that costs no system call. The one
    system call keeps the interpreter: otherwise the woken thread would take it, and the control thread wait for it.
    """

    def __init__(self) -> None:
        self._woken = False
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)

    def fileno(self) -> int:
        return self._read.fileno()

    def wake(self) -> None:
        if self._woken:
            return
        self._woken = True
        # Errors are ignored. Full: it is awake already; closed: there is no thread to wake.
        _send(self._write.fileno(), b"!", 1, _NO_SIGNAL)

    def drain(self) -> None:
        """Forget the wake-ups so far. For the polling thread."""
        with contextlib.suppress(BlockingIOError):
            self._read.recv(4096)
        self._woken = False  # last: a byte that came in between would be read and its wake-up forgotten

    def close(self) -> None:
        self._read.close()
        self._write.close()

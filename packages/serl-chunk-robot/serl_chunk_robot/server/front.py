"""What stands between a robot's clients and its loop: takes requests, publishes the state, and watches the loop.

It runs in a process of its own (`main`), so that no flood, no large message and no memory of clients reaches
the loop, and so that a loop that stands still is noticed: then it publishes STALLED, answers requests itself, and ends
the loop's process if a signal was to end it. It decides nothing else: who may do what is the loop's to say.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import resource
import select
import signal
import socket
import threading
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import msgpack
import zmq

from serl_chunk_robot.errors import ConfigError
from serl_chunk_robot.safety.table import OPERATOR
from serl_chunk_robot.server.admission import Address, Admission
from serl_chunk_robot.server.door import BEAT, BEATS, REPLY, REQUEST, STATE, Request
from serl_chunk_robot.server.peers import Peers, Waiting
from serl_chunk_robot.server.processes import PRIORITY, Child, raise_priority, run_child
from serl_chunk_robot.wire import arrays, codec
from serl_chunk_robot.wire.codec import WireError
from serl_chunk_robot.wire.connection_guard import ChannelLimits, ConnectionGuard
from serl_chunk_robot.wire.link import SIGNAL, Link
from serl_chunk_robot.wire.protocol import MAX_FRAME, MAX_REQUEST, MAX_STATE, STATE_PORT
from serl_chunk_robot.wire.sockets import bind, descriptor_of, make_socket, try_send

logger = logging.getLogger(__name__)

STALLED = "STALLED"  # the published state while none comes from the loop
PATIENCE = 0.25  # s without a state, after which the loop stands still
STARTING = 5.0  # s until the first one
REPEATED = 0.1  # s between two states of a loop that stands still
ENDS_WITHIN = 3.0  # s after a signal in which a loop that stands still may go on and end
BATCH, BATCH_BYTES = 64, 1 << 20  # messages and bytes read at once at most
FULL_PAUSE = 0.001  # s after that much: a flood of messages must not take a whole core
MOST_PARTS = 16  # of a message that is answered; one of more ends its connection
SKIPPED = 2000  # parts of such a message that are read at once
MOST_VALUES = 1024  # in a request: the loop decodes them
STATES_QUEUED, REQUESTS_QUEUED, REPLIES_QUEUED = 8, 4, 32  # messages of one slow subscriber, and of one peer
LOOK = 0.005  # s between two looks at what connections hold
REQUESTS, STATES = "requests", "states"
CONNECTIONS = 256  # to each of both sockets, of peers that do not lead
LIMITS = {
    REQUESTS: ChannelLimits(1 << 18, 1 << 17, 1 << 20, waits=True, strangers=CONNECTIONS, greeted_stay=True),
    # Of subscriptions, which are never counted as complete.
    STATES: ChannelLimits(1 << 18, 1 << 17, 1 << 17, strangers=CONNECTIONS, greeted_stay=True),
}
FIRST = "Press the hardware emergency stop."
PASSES = 3.0  # of a slow loop that it may miss
DESCRIPTORS = 4096  # two of each connection
PAUSE = 0.1  # s before the next front is started: no request is received meanwhile
LAST_STATE = 500  # ms that the last state has to leave when the sockets close
BIND_AGAIN, BIND_WITHIN = 0.1, 2.0  # s: the front before it may not have ended in full


class LoopWatch:
    """What the loop published last, and whether it stands still since then.

    `patience`: seconds without a state, after which it does.
    """

    def __init__(self, patience: float, clock: Callable[[], float]) -> None:
        self.stalled = False
        self.state = b""  # the newest
        self.patience, self._published_at = patience, clock()
        self._decoded = b""  # the state that `_facts` are of
        self._facts: Dict[str, Any] = {}

    def published(self, state: bytes, now: float) -> None:
        self.state, self._published_at = state, now

    def look(self, now: float) -> float:
        """Note whether the loop stands still; returns the seconds since its newest state."""
        silent = now - self._published_at
        stalled = silent > (self.patience if self.state else max(self.patience, STARTING))
        if stalled != self.stalled:
            self.stalled = stalled
            logger.warning("the loop %s: silent_s=%.2f", "stands still" if stalled else "goes on", silent)
        return silent

    def known(self) -> Dict[str, Any]:
        if self._decoded is not self.state:
            self._decoded = self.state
            with contextlib.suppress(WireError):
                self._facts = arrays.unpack(self.state, MAX_STATE)
        return self._facts

    def standing(self, word: str, silent: float) -> Dict[str, Any]:
        """Return what a state or reply has of a loop that stands still."""
        moment = self.known().get("moment", 0.0) + silent
        return {"state": STALLED, "word": f"{word}: it obeys no request. {FIRST}", "moment": moment}


class OutsideStop:
    """The driver's own stop, which needs no loop, in a thread: one at a time."""

    def __init__(self, stop: Callable[[str], None]) -> None:
        self._stop = stop
        self._thread: Optional[threading.Thread] = None

    def begin(self, reason: str) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, args=(reason,), name="stop", daemon=True)
            self._thread.start()

    def _run(self, reason: str) -> None:
        try:
            self._stop(reason)
            logger.warning("the driver's stop was done from outside: reason=%s", reason)
        except Exception as e:  # of a lab's code
            logger.error("the driver's stop from outside failed: %s %s", type(e).__name__, e)


class Front:
    """The sockets of one robot's server, on loopback or behind keys.

    Args:
        link: its other end is the loop's `Door`.
        patience: seconds without a state, after which the loop stands still.
        stop_outside: the driver's own stop, that needs no loop; None: there is none.
        end_loop: ends the loop's process, which stands still and does not heed a signal.

    Raises ConfigError: the address is in use, or reachable without keys; the keys cannot be read.
    """

    def __init__(
        self, link: Link, address: Address, *, patience: float = PATIENCE,
        stop_outside: Optional[Callable[[str], None]] = None, end_loop: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = monotonic,
    ) -> None:  # fmt: skip
        self._link, self._clock, self._end_loop = link, clock, end_loop
        self._outside = None if stop_outside is None else OutsideStop(stop_outside)
        self.loop = LoopWatch(patience, clock)
        self.peers = Peers()
        self.guard = ConnectionGuard(LIMITS, self._cut, zmq.EVENT_HANDSHAKE_SUCCEEDED, calm=LOOK)
        self._name = os.urandom(6)  # of this front: libzmq numbers the connections of each process alike
        self._repeat_at = self._beat_at = self._read_at = self._signalled = 0.0
        self._skipping = False  # the rest of a message of too many parts
        address.check()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.admission: Optional[Admission] = None
        try:
            if address.keys is not None:
                self.admission = Admission(self._context, address.keys)
            self._requests = self._bound(REQUESTS, zmq.ROUTER, address.host, address.port)
            self._states = self._bound(STATES, zmq.PUB, address.host, address.port + STATE_PORT)
        except BaseException:
            self._end()
            raise
        self._calm, self._busy = zmq.Poller(), zmq.Poller()
        for poller in (self._calm, self._busy):
            poller.register(link.fileno(), zmq.POLLIN)
            for monitor in self.guard.monitors.values():
                poller.register(monitor, zmq.POLLIN)
        self._calm.register(self._requests, zmq.POLLIN)

    def _bound(self, channel: str, kind: int, host: str, port: int) -> zmq.Socket[bytes]:
        s = make_socket(self._context, kind, MAX_REQUEST, MAX_FRAME)
        s.rcvhwm = REQUESTS_QUEUED
        s.sndhwm = STATES_QUEUED if kind == zmq.PUB else REPLIES_QUEUED
        if self.admission is not None:
            self.admission.secure(s)
        self.guard.watch(channel, s, port)
        bind(s, host, port)
        return s

    @property
    def ended(self) -> bool:
        return self._link.ended

    def step(self, seconds: float = LOOK) -> None:
        """Do what is to be done now, after waiting for it for so long at most."""
        now = self._clock()
        paused = now < self._read_at
        wait = min(seconds, FULL_PAUSE if paused else LOOK)
        ready = dict((self._busy if paused else self._calm).poll(round(1e3 * wait)))
        self._read_link()
        if self._requests in ready:
            self._receive()
        self._watch()
        self._pump()
        for channel, monitor in self.guard.monitors.items():
            if monitor in ready:
                self.guard.read(channel)
        if self._clock() >= self.guard.look_at:
            self.guard.look((REQUESTS, connection) for connection in self.peers.leading())

    def close(self) -> None:
        """Close the sockets, once the loop's last state, which says why it ended, has had a moment to leave."""
        if not self._states.closed:
            self._read_link()
            self._states.close(linger=LAST_STATE)
        self._end()

    def _end(self) -> None:
        if self.admission is not None:
            self.admission.close()
        self.guard.close()
        self._context.destroy(linger=0)

    # From the loop.

    def _read_link(self) -> None:
        while True:
            message = self._link.receive()
            if message is None:
                return
            kind, payload = message
            if kind == STATE:
                self.loop.published(payload, self._clock())
                try_send(self._states, [payload])
            elif kind == REPLY:
                serial, rank, body = msgpack.unpackb(payload)
                waiting = self.peers.returned(serial, rank)
                if waiting is not None and body:
                    self._answer(waiting, body)
            elif kind == SIGNAL:
                self._signalled = self._signalled or self._clock()

    def _answer(self, waiting: Waiting, body: bytes) -> None:
        try_send(self._requests, [waiting.request.connection, *waiting.envelope, body])  # a peer that is gone gets none

    # From clients.

    def _receive(self) -> None:
        taken = 0
        for k in range(BATCH):
            if self._skipping and not self._skip():
                break
            frames = self._frames()
            if not frames:
                self.guard.drained += 1
                return
            if not self.guard.count(REQUESTS, frames[0].bytes):
                self.guard.know(REQUESTS, frames[0].bytes, descriptor_of(frames[-1]))
            self._take(frames)
            if k == 0:
                self._pump()  # the only one, as a rule: it need not wait for the look whether there is another
            taken += codec.size_of(frames)
            if taken > BATCH_BYTES:
                break
        self._read_at = self._clock() + FULL_PAUSE

    def _frames(self) -> List[zmq.Frame]:
        """Return the next message, or as much of it as is answered; empty where there is none."""
        frames: List[zmq.Frame] = []
        if not int(self._requests.getsockopt(zmq.EVENTS)) & int(zmq.POLLIN):
            return frames
        with contextlib.suppress(zmq.Again):
            frames.append(self._requests.recv(zmq.NOBLOCK, copy=False))
            while frames[-1].more and len(frames) <= MOST_PARTS:
                frames.append(self._requests.recv(zmq.NOBLOCK, copy=False))
        self._skipping = bool(frames) and frames[-1].more
        return frames

    def _skip(self) -> bool:
        """Read on in a message of too many parts; returns whether that is over."""
        with contextlib.suppress(zmq.Again):
            for _ in range(SKIPPED):
                if not self._requests.recv(zmq.NOBLOCK, copy=False).more:
                    self._skipping = False
                    break
        return not self._skipping

    def _take(self, frames: List[zmq.Frame]) -> None:
        connection, body = frames[0].bytes, frames[1:]
        if self._skipping:
            self.guard.cut(REQUESTS, connection, f"a message of more than {MOST_PARTS} parts")
            return
        envelope: Tuple[bytes, ...] = ()
        if len(body) == 2 and not len(body[0]):  # of a REQ
            envelope, body = (b"",), body[1:]
        content, op, number, problem = b"", "", None, ""
        if len(body) != 1:
            problem = f"a request is one frame, got {len(body)}"
        elif len(body[0]) > MAX_REQUEST:
            problem = f"a message of {len(body[0])} bytes; the limit is {MAX_REQUEST}"
        else:
            content = body[0].bytes
            op, number, problem = _read(content)
        most, key = OPERATOR, ""  # without keys only this machine's users reach the server
        if self.admission is not None:
            admitted = self.admission.key_of(frames[-1])
            most, key = ("", "") if admitted is None else (admitted.role, admitted.name)
        request = Request(connection, content, problem, most, key, _address_of(frames[-1]), op == "stop")
        waiting = Waiting(request, op, envelope, number, op == "command" and number is None)
        stop = self.peers.stop(waiting) if request.stop else None
        if stop is None:
            self.peers.add(waiting)
        else:
            self._send(stop)

    def _cut(self, channel: str, why: str) -> None:
        self.peers.counts["cut"] += 1
        if self.peers.counts["cut"] & (self.peers.counts["cut"] - 1) == 0:  # the 1st, 2nd, 4th, 8th, ...
            logger.warning("connection cut: channel=%s reason=%s so_far=%d", channel, why, self.peers.counts["cut"])

    def _pump(self) -> None:
        self._link.flush()
        while not self.loop.stalled:
            waiting = self.peers.next()
            if waiting is None:
                break
            self._send(waiting)
        now = self._clock()
        if now >= self._beat_at and not self.loop.stalled:  # nothing is piled up before a loop that stands still
            self._beat_at = now + BEATS
            self._link.send(BEAT, msgpack.packb([int.from_bytes(self._name, "little"), dict(self.peers.counts)]))

    def _send(self, waiting: Waiting) -> None:
        request = waiting.request
        request = request._replace(connection=self._name + request.connection, sent=self._clock())
        self._link.send(REQUEST, request.packed(), keep=True)

    # A loop that stands still.

    def _watch(self) -> None:
        now = self._clock()
        silent = self.loop.look(now)
        if not self.loop.stalled:
            return
        word = f"the server's loop has stood still for {silent:.1f} s"
        for waiting in list(self.peers.given_up()):
            if not waiting.silent:
                self._answer(waiting, self._not_confirmed(waiting, word, silent))
            if waiting.request.stop and self._outside is not None:
                self._outside.begin(f"a stop by {waiting.request.key or waiting.request.address}")
        if now >= self._repeat_at and self.loop.state:
            self._repeat_at = now + REPEATED
            state = {**self.loop.known(), **self.loop.standing(word, silent), "stalled": silent}
            try_send(self._states, [arrays.pack(state)])
        if self._signalled and min(silent, now - self._signalled) > ENDS_WITHIN:
            self._signalled = 0.0
            logger.error("the loop does not end: %s. Its process is killed; the arms keep the last set point", word)
            self._end_loop()

    def _not_confirmed(self, waiting: Waiting, word: str, silent: float) -> bytes:
        error = f"{waiting.op or 'request'}: {word}. Nothing is done before it goes on."
        if waiting.op in ("stop", "hold"):
            error = f"THE ROBOT DID NOT CONFIRM the {waiting.op}: {word}. {FIRST}"
        if waiting.request.stop and self._outside is not None:
            error += " The driver's own stop was requested from outside the loop."
        known = {name: self.loop.known().get(name) for name in ("generation", "run")}
        return arrays.pack({
            **known, **self.loop.standing(word, silent), "id": waiting.number, "ok": False, "error": codec.shown(error),
            "greet": False, "confirmed": False,
        })  # fmt: skip


def _read(content: bytes) -> Tuple[str, Optional[int], str]:
    """Return "op" and "id" of a request, and why it is none."""
    try:
        values = msgpack.unpackb(content, max_ext_len=0, strict_map_key=True)
    except Exception as e:
        return "", None, f"the message is not msgpack: {type(e).__name__} {e}"
    if not isinstance(values, dict):
        return "", None, "the message is not a map of named values"
    if len(content) > MOST_VALUES and _beyond(values, MOST_VALUES) < 0:
        return "", None, f"it holds more than {MOST_VALUES} values"
    op, number = values.get("op"), values.get("id")
    return op if isinstance(op, str) else "", number if type(number) is int else None, ""


def _beyond(value: Any, left: int) -> int:
    """Count a value and those in it down from `left`; returns what is left, negative for too many."""
    left -= 1
    if isinstance(value, (dict, list)):
        for each in value.values() if isinstance(value, dict) else value:
            if left < 0:
                break
            left = _beyond(each, left)
    return left


def _address_of(frame: zmq.Frame) -> str:
    with contextlib.suppress(zmq.ZMQError):
        address = str(frame.get("Peer-Address"))
        return address[7:] if address.startswith("::ffff:") else address
    return ""


class Job(NamedTuple):
    """What the process gets, as plain values."""

    host: str
    port: int
    keys: Optional[str]
    link: int  # descriptor
    dt: float  # s between two passes of the loop
    stop_outside: str  # "module:function", as in `DriverSpec`
    options: Dict[str, Any]  # of the driver, for it


def child(
    address: Address, link: socket.socket, dt: float, stop_outside: str, options: Dict[str, Any],
    on_end: Callable[[str], None],
) -> Child:  # fmt: skip
    """Return the front of a robot. `link`: the front's end; `on_end`: gets the reason of each end of the process."""
    keys = None if address.keys is None else str(address.keys)
    job = Job(address.host, address.port, keys, link.fileno(), dt, stop_outside, options if stop_outside else {})
    return Child("front", "front", __name__, job._asdict(), (link.fileno(),), on_end, PAUSE)


def made(job: Job) -> Front:
    """Make the front of a job. Raises ConfigError."""
    link = Link(socket.socket(fileno=job.link))
    address = Address(job.host, job.port, None if job.keys is None else Path(job.keys))
    patience, server, ends = max(PATIENCE, PASSES * job.dt), os.getppid(), monotonic() + BIND_WITHIN
    while True:
        try:
            end_loop = partial(_kill, server)
            return Front(link, address, patience=patience, stop_outside=_stop_of(job), end_loop=end_loop)
        except ConfigError:
            if monotonic() > ends:
                raise
            select.select([0], [], [], BIND_AGAIN)


def _stop_of(job: Job) -> Optional[Callable[[str], None]]:
    if not job.stop_outside:
        return None
    module, _, name = job.stop_outside.partition(":")
    try:
        return partial(getattr(importlib.import_module(module), name), job.options)
    except (ImportError, AttributeError, ValueError) as e:
        raise ConfigError(f"stop_outside {job.stop_outside!r} of the driver cannot be loaded: {e}") from e


def _kill(process: int) -> None:
    if os.getppid() == process:  # else its number may be another one's by now
        os.kill(process, signal.SIGKILL)


def _allow_descriptors() -> None:
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if most == resource.RLIM_INFINITY else min(DESCRIPTORS, most)
    if resource.RLIM_INFINITY != now < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def main() -> None:
    """Run the process."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)  # it ends with the server, which a signal to both would end
    server = os.getppid()
    _allow_descriptors()

    def work(job: Dict[str, Any], report: Callable[[str], None]) -> None:
        with contextlib.closing(made(Job(**job))) as front:
            raise_priority(PRIORITY - 1)  # after the loop: on a machine of one core it must not keep it waiting
            while os.getppid() == server and not front.ended and not select.select([0], [], [], 0)[0]:
                front.step()

    run_child(work, str)


if __name__ == "__main__":  # by its name, so that this process has one class Front
    importlib.import_module("serl_chunk_robot.server.front").main()

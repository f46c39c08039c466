"""The loop's end of the link to the front (`front`): requests come in, replies and states go out, and nothing waits.

What a front sends is bounded: at most MOST_UNDER_WAY requests and one stop of each peer are under way. A request of a
peer is sent only after the reply to the one before it.
"""

from __future__ import annotations

import select
from collections import deque
from time import monotonic
from typing import Callable, Deque, Dict, NamedTuple, Optional

import msgpack

from serl_chunk_robot.wire.link import Link

REQUEST, BEAT, STATE, REPLY = 65, 66, 67, 68  # kinds of messages: two to the loop, two to the front
MOST_UNDER_WAY = 16  # requests, all peers together
A_PASS = 16  # requests taken in a pass of the loop at most
BEATS = 0.1  # s between two signs of life of the front
SILENT = 1.0  # s without one, after which no request can be received
PAUSED = 0.2  # s without a pass: silence counts from there
STRANGER, GREETED, LEADS = 0, 1, 2  # ranks of peers; LEADS: operators, and who holds the lease


class Request(NamedTuple):
    """One request, as the front admitted it."""

    connection: bytes  # of all fronts
    body: bytes
    problem: str = ""  # why the message is no request
    most: str = "operator"  # the most that the client may be; empty: its key is not admitted any more
    key: str = ""  # the name of its key's file; empty where no keys are required
    address: str = ""  # of the client's machine
    stop: bool = False
    sent: float = 0.0  # monotonic seconds at which the front sent it
    serial: int = 0  # of the front
    waited: float = 0.0  # s that it lay here

    def packed(self) -> bytes:
        return bytes(msgpack.packb(self[:-1]))


class Reply(NamedTuple):
    """What the loop answers; `body` is empty for a command that gets no answer. `rank`: the peer's from now on."""

    serial: int
    rank: int
    body: bytes

    def packed(self) -> bytes:
        return bytes(msgpack.packb(tuple(self)))


class Door:
    """Takes requests and gives replies and states. Used by the loop's thread, but for `front_ended`.

    `link`: its other end belongs to the front.
    """

    def __init__(self, link: Link, clock: Callable[[], float] = monotonic) -> None:
        self.counts: Dict[str, int] = {}  # of what the front dropped, and why
        self._link, self._clock = link, clock
        self._stops: Deque[Request] = deque()
        self._requests: Deque[Request] = deque()
        self._poll = select.poll()
        self._poll.register(link.fileno(), select.POLLIN)
        self._beaten = False
        self._heard = self._passed = clock()
        self._front, self._gone = 0, -1  # numbers of the front that was heard last, and of the one that ended last
        self._ended = ""  # why it did, until the next one is there

    def front_ended(self, reason: str) -> None:
        """The front's process ended. From any thread."""
        self._gone, self._ended = self._front, reason or "its process ended"

    def wait_for_front(self, seconds: float) -> str:
        """Wait until the front receives requests; returns why it does not."""
        ends = self._clock() + seconds
        while not self._beaten and not self._ended and self._clock() < ends:
            self.wait(0.05)
        late = f"the front is not ready after {seconds:g} s. Start the server again"
        return "" if self._beaten else self._ended or late

    def wait(self, seconds: float) -> bool:
        ends = self._clock() + seconds
        while not self._receive() and not self._link.ended:
            left = int(1e3 * (ends - self._clock()))  # ms, as poll has them
            if left < 1 or not self._poll.poll(left):
                return False
        return bool(self._stops or self._requests)

    def take(self) -> Optional[Request]:
        """Return the next request, stops first; None where none has come."""
        self._receive()
        queue = self._stops or self._requests
        if not queue:
            return None
        request = queue.popleft()
        return request._replace(waited=max(0.0, self._clock() - request.sent))

    def reply(self, request: Request, rank: int, body: bytes = b"") -> None:
        """Answer a request that was taken. Every one must be: its peer's next one waits for that."""
        self._link.send(REPLY, Reply(request.serial, rank, body).packed(), keep=True)

    def publish(self, state: bytes) -> None:
        self._link.send(STATE, state)

    def fault(self) -> str:
        """Return why no request can be received; empty where they can be. For each pass."""
        now = self._clock()
        if now - self._passed > PAUSED:  # the loop stood, and the front sends nothing to one that does
            self._heard = max(self._heard, now)
        self._passed = now
        if self._ended:
            return self._ended
        if self._link.ended:
            return "its process ended"
        return f"it is silent for {now - self._heard:.1f} s" if now - self._heard > SILENT else ""

    def close(self) -> None:
        self._link.close()

    def _receive(self) -> bool:
        """Read what has come; returns whether a request is there."""
        while True:
            message = self._link.receive()
            if message is None:
                return bool(self._stops or self._requests)
            kind, payload = message
            if kind == REQUEST:
                request = Request(*msgpack.unpackb(payload, use_list=False))
                (self._stops if request.stop else self._requests).append(request)
            elif kind == BEAT:
                self._front, self.counts = msgpack.unpackb(payload)
                self._heard, self._beaten = self._clock(), True
                if self._front != self._gone:  # else it was sent before the end
                    self._ended = ""

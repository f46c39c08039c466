"""Flow control: the bytes that may be on their way, the size of messages, and time-outs that fit the link.

Megabytes sent at once would make the heartbeats behind them late on a slow link.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from serl_chunk.transport.wire.handshake import Clock

LEAST_BYTES = 4 << 10  # of a message that is part of something larger: below it the headers begin to cost
_MESSAGES = 4  # in a full window: enough to hide the round trip, and each of them is a sign of progress
_LEAST_WINDOW = _MESSAGES * LEAST_BYTES
_FIRST_WINDOW = 4 * _LEAST_WINDOW  # a connection that is closed still has so much in the system's buffers
_AIM = 0.25  # share of `timeout_s` that a full window may take to arrive: both directions and heartbeats fit in
_UNKNOWN_PACE = 1 / (64 << 10)  # seconds per byte, assumed until something has arrived
_MOST_DOUBLINGS = 4  # a learner that returns is found within 16 time-outs


class Sent(NamedTuple):
    """One message on its way."""

    nbytes: int
    at: float  # when it was handed to the socket


class Flow:
    """The bytes on their way in one direction: congestion control above TCP's, whose buffers hide a slow link.

    The window begins small with every connection. It doubles while what fills it arrives in half the aimed time, or
    grows fourfold on a fast link, and shrinks where it takes longer, the round trip aside. `most` bytes are on their
    way on the fastest link, `largest` in a message.
    """

    def __init__(self, *, most: int, largest: int, timeout_s: float, clock: Clock = time.monotonic) -> None:
        self.in_flight = 0  # bytes
        self.arrived = 0  # bytes since the start
        self._most, self._largest = most, largest
        self._aim_s = _AIM * timeout_s
        self._clock = clock
        self._arrived_at = clock()
        self._first_window = _FIRST_WINDOW
        self.restart()

    def restart(self) -> None:
        self.in_flight = 0
        self._set_window(self._first_window)
        self.pace = 0.0  # seconds per byte; 0 for unknown
        self._round_trip = self._aim_s / 2  # seconds: the shortest seen, and no more than this

    def slow_down(self) -> None:
        """Begin the next connections with the least window, until one has carried more."""
        self._first_window = _LEAST_WINDOW

    def cut(self, nbytes: int) -> int:
        if nbytes <= self.message_bytes:
            return nbytes
        self._limited = True
        return self.message_bytes

    def has_room(self, nbytes: int) -> bool:
        if not self.in_flight or self.in_flight + nbytes <= self._window:
            return True
        self._limited = True
        return False

    def send(self, nbytes: int) -> Sent:
        """Count a sent message. Returns the argument of `arrive` or `cancel`."""
        self.in_flight += nbytes
        return Sent(nbytes, self._clock())

    def cancel(self, sent: Sent) -> None:
        """Forget a message that was answered without what was requested: it shows nothing about the link."""
        self.in_flight -= sent.nbytes

    def arrive(self, sent: Sent) -> None:
        now = self._clock()
        self.in_flight -= sent.nbytes
        self.arrived += sent.nbytes
        if sent.nbytes >= LEAST_BYTES:  # of smaller ones the round trip is all that shows
            pace = (now - max(sent.at, self._arrived_at)) / sent.nbytes
            self.pace = (self.pace + pace) / 2 if self.pace else pace
        self._arrived_at = now
        if sent.at < self._changed_at:
            return
        took = now - sent.at
        self._round_trip = min(self._round_trip, took)
        took -= self._round_trip
        if took > self._aim_s:
            self._set_window(max(_LEAST_WINDOW, int(self._window * max(0.25, self._aim_s / took))))
        elif self._limited and took < self._aim_s / 2:
            more = 4 if now - sent.at < self._aim_s / 16 else 2  # a message is a quarter of the window
            self._set_window(max(_LEAST_WINDOW, min(self._most, more * self._window)))

    def _set_window(self, window: int) -> None:
        self._window = window
        self.message_bytes = max(LEAST_BYTES, min(self._largest, window // _MESSAGES))  # of a part of something larger
        self._limited = False  # whether the window has held anything back since it changed
        self._changed_at = self._clock()  # messages sent before do not measure the window
        if window >= _FIRST_WINDOW:
            self._first_window = _FIRST_WINDOW


class AdaptiveTimeout:
    """Seconds of silence after which a connection is closed: `timeout_s`, and what the bytes on their way need.

    It doubles with every connection that carried nothing, and falls back once one has.
    """

    def __init__(self, timeout_s: float, *flows: Flow) -> None:
        self._timeout_s, self._flows = timeout_s, flows
        self._futile = 0  # connections in a row
        self._carried = 0  # bytes before the current connection

    def is_over(self, waited_s: float) -> bool:
        return waited_s > self._timeout_s and waited_s > self.seconds

    @property
    def seconds(self) -> float:
        needed = sum(2 * f.in_flight * (f.pace or _UNKNOWN_PACE) for f in self._flows)
        return float(self._timeout_s * 2**self._futile + needed)

    def begin(self) -> None:
        self._carried = self._total

    def succeed(self) -> None:
        self._futile = 0

    def give_up(self) -> None:
        self._futile = 0 if self._total > self._carried else min(_MOST_DOUBLINGS, self._futile + 1)
        self._carried = self._total
        for f in self._flows:
            f.slow_down()

    @property
    def _total(self) -> int:
        return sum(f.arrived for f in self._flows)

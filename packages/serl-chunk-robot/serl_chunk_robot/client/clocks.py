"""Maps the clock of a robot's server to that of a client on another machine, by messages in both directions.

Neither clock is the other's, nor do they run equally fast, and the delays of a network vary. A message from the client
that came at a moment of the server's clock bounds the difference of the clocks from above, one from the server from
below. The tightest bounds are those of the messages that were delayed least. Between them lies the least round trip,
half of which is taken for the way to the server: where the ways there and back differ in their least delays, the error
is half of that difference, which no exchange of messages shows.
"""

from __future__ import annotations

import math
import time
from collections import deque
from typing import Deque

DRIFT = 250e-6  # s per s by which the clocks may run apart; those of computers differ by less
TRIPS = 100  # the newest, of which the shortest is taken for one without waiting


def boot_time() -> float:
    """Return the seconds since this machine started, with those of its suspends, which its monotonic clock leaves out.

    Where the system has no such clock, as macOS, it is the monotonic one.
    """
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class ClockMap:
    """The difference between the clocks of one process of a server and of this machine. All moments are in seconds."""

    def __init__(self) -> None:
        # A bound widens by DRIFT. These are its values at moment 0 of this clock, so that all can be compared.
        self._above, self._below = math.inf, -math.inf
        self._trips: Deque[float] = deque(maxlen=TRIPS)

    def exchanged(self, sent: float, moment: float, received: float) -> None:
        """Take the times of a request.

        Args:
            sent: when it was sent.
            moment: when it came, on the server's clock.
            received: when its reply came.
        """
        self._trips.append(received - sent)
        self.arrived(sent, moment)
        self.came(moment, received)

    def arrived(self, sent: float, moment: float) -> None:
        """A message that was sent at `sent` was taken at `moment` of the server's clock."""
        self._above = min(self._above, moment - sent - DRIFT * sent)
        if self._above + DRIFT * sent < self._below - DRIFT * sent:  # a machine was suspended: its clock stood still
            self._below = -math.inf
            self._above = moment - sent - DRIFT * sent

    def came(self, moment: float, received: float) -> None:
        """A message of `moment` of the server's clock was read at `received`."""
        self._below = max(self._below, moment - received + DRIFT * received)
        if self._above + DRIFT * received < self._below - DRIFT * received:
            self._above = math.inf
            self._below = moment - received + DRIFT * received

    def server_time(self, now: float) -> float:
        """Return the server's clock at `now` of this one; NaN before the first message from the server."""
        above, below = self._above + DRIFT * now, self._below - DRIFT * now
        if below == -math.inf:
            return now + above - self._half() if above < math.inf else math.nan
        if above == math.inf:  # only states were read: they are as old as their delay
            return now + below
        return now + max(above - self._half(), below)

    def _half(self) -> float:
        return 0.5 * min(self._trips, default=0.0)

"""How much may be on its way, and how long to wait for it, by a clock and a link that the test moves."""

from __future__ import annotations

import collections

from hypothesis import given
from hypothesis import strategies as st

from serl_chunk.transport.client.flow import LEAST_BYTES, AdaptiveTimeout, Flow

TIMEOUT = 5.0
MOST, LARGEST = 32 << 20, 1 << 20


class Line:
    """A link of `rate` bytes per second and a round trip, which carries what a flow lets it."""

    def __init__(self, rate: float, round_trip: float = 0.01) -> None:
        self.rate, self.round_trip = rate, round_trip
        self.now = self.free_at = 0.0
        self.flow = Flow(most=MOST, largest=LARGEST, timeout_s=TIMEOUT, clock=lambda: self.now)
        self.longest = 0.0  # that the line took for what had been handed over
        self._queue: collections.deque = collections.deque()

    def carry(self, nbytes: int) -> None:
        """Send `nbytes` as the flow cuts them, and wait for them."""
        while nbytes or self._queue:
            while nbytes:
                piece = self.flow.cut(nbytes)
                if not self.flow.has_room(piece):
                    break
                self.free_at = max(self.now, self.free_at) + piece / self.rate
                self._queue.append((self.free_at + self.round_trip, self.flow.send(piece)))
                self.longest = max(self.longest, self.free_at - self.now)
                nbytes -= piece
            at, sent = self._queue.popleft()
            self.now = max(self.now, at)
            self.flow.arrive(sent)


def test_on_a_slow_link_what_is_on_its_way_takes_a_part_of_the_time_out():
    rate = 2e4
    line = Line(rate)
    line.carry(1 << 20)
    line.longest = 0.0
    line.carry(4 << 20)
    assert line.longest < 0.8 * TIMEOUT
    assert line.flow.message_bytes / rate < TIMEOUT / 4
    assert line.now < 1.2 * (5 << 20) / rate  # and the line is not idle


@given(st.lists(st.tuples(st.integers(1, 1 << 22), st.floats(1e3, 1e9), st.booleans()), max_size=20))
def test_whatever_a_link_does_a_message_may_always_be_sent(events):
    line = Line(1e6)
    for nbytes, rate, broken in events:
        line.rate = rate
        line.carry(nbytes)
        assert line.flow.in_flight == 0
        assert LEAST_BYTES <= line.flow.message_bytes <= LARGEST
        assert line.flow.has_room(1 << 30)  # nothing is on its way
        if broken:
            line.flow.slow_down()
            line.flow.restart()
            assert line.flow.message_bytes == LEAST_BYTES


def test_patience_doubles_with_futile_connections_and_falls_back():
    line = Line(1e5)
    timeout = AdaptiveTimeout(TIMEOUT, line.flow)
    waits = []
    for _ in range(8):
        timeout.begin()
        waits.append(timeout.seconds)
        timeout.give_up()
    assert waits == [TIMEOUT * n for n in (1, 2, 4, 8, 16, 16, 16, 16)]
    timeout.begin()
    line.carry(10)
    timeout.give_up()  # and yet it carried something
    assert timeout.seconds == TIMEOUT
    timeout.give_up()
    assert timeout.seconds == 2 * TIMEOUT
    timeout.succeed()
    assert timeout.seconds == TIMEOUT

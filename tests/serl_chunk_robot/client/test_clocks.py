"""The server's clock at a client, over a simulated link."""

from __future__ import annotations

import math

import numpy as np
import pytest

from serl_chunk_robot.client.client import ClockMap

TICK = 0.02


class Link:
    """A server whose clock is an hour ahead and runs at another speed, and delays of messages, seconds.

    Args:
        up, down: the least delays.
        jitter: mean of what is added to each message, exponentially; one in a hundred waits for 0.2 s more.
    """

    def __init__(self, drift: float, up: float, down: float, jitter: float, seed: int) -> None:
        self._drift, self._up, self._down, self._jitter = drift, up, down, jitter
        self._rng = np.random.default_rng(seed)
        self.map, self.now = ClockMap(), 1e5

    def server(self, now: float) -> float:
        return 3600.0 + (1 + self._drift) * now

    def delay(self, least: float) -> float:
        return least + self._rng.exponential(self._jitter) + (0.2 if self._rng.random() < 0.01 else 0.0)

    def reset(self) -> None:
        """A motion of two seconds, in which the actor waits for the reply to a request in each tick."""
        for _ in range(100):
            taken = self.now + self.delay(self._up)
            received = taken + self.delay(self._down)
            self.map.exchanged(self.now, self.server(taken), received)
            self.now = received + TICK

    def tick(self) -> None:
        """A tick of an episode: a command, and a state that is up to a pass older than the tick."""
        taken = self.now + self.delay(self._up)
        self.map.arrived(self.now, self.server(taken))
        waited = self._rng.uniform(0.0, 0.005)
        self.map.came(self.server(self.now - waited - self.delay(self._down)), self.now)
        self.now += TICK

    def error(self) -> float:
        return abs(self.map.server_time(self.now) - self.server(self.now))


@pytest.mark.parametrize(
    ("drift", "up", "down", "jitter"),
    [
        (0.0, 0.0001, 0.0001, 0.0002),  # a cable
        (-200e-6, 0.002, 0.002, 0.005),  # a radio link
        (200e-6, 0.001, 0.003, 0.001),  # ways that differ by 2 ms, of which half remains
    ],
)
def test_clocks_an_hour_apart_that_drift_are_mapped_within_2_ms(drift, up, down, jitter):
    link = Link(drift, up, down, jitter, seed=1)
    errors = []
    for _ in range(4):
        link.reset()
        for _ in range(round(30 / TICK)):
            link.tick()
            errors.append(link.error())
    assert max(errors) < 0.002


def test_states_alone_map_the_clock_but_for_their_delay():
    link = ClockMap()
    assert math.isnan(link.server_time(5.0))
    for k in range(10):
        link.came(100.0 + k, 50.004 + k)
    assert link.server_time(60.0) == pytest.approx(109.996, abs=1e-3)


@pytest.mark.parametrize("jump", [-100.0, 100.0])
def test_a_clock_that_jumped_is_mapped_anew(jump):
    link = ClockMap()
    link.exchanged(10.0, 110.001, 10.002)
    link.exchanged(11.0, 111.001 + jump, 11.002)
    assert link.server_time(12.0) == pytest.approx(112.0 + jump, abs=1.5e-3)

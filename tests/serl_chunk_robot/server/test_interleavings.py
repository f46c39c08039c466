"""Random interleavings of requests, commands and faults, against a model that is written apart.

The model is in tests/support/robot_model.py: what may be commanded when, and which state follows. What arrives at the
driver is checked in each pass: no command of an older generation, nothing beyond a limit, nothing in STOPPED.
"""

from __future__ import annotations

from collections import Counter

import pytest
from robot_interleavings import Interleaving, interleave
from robot_socket_interleavings import interleave_sockets

STEPS, RUNS = 2500, 2


def tried(lives: list[Interleaving]) -> tuple[Counter[str], Counter[str], Counter[str]]:
    events, states, reasons = Counter[str](), Counter[str](), Counter[str]()
    for life in lives:
        events += life.counts
        states += life.states
        reasons += life.world.gate.counts
    return events, states, reasons


def test_no_interleaving_leads_beyond_a_limit():
    """5 x 10^3 steps: events with up to 210 passes after each."""
    lives = [interleave(seed, STEPS) for seed in range(RUNS)]
    events, states, reasons = tried(lives)
    assert set(events) == set(Interleaving.WEIGHTS), "each event was there"
    assert set(states) == {"STOPPED", "HELD", "HOLD", "RUN", "MOVE", "BRAKE"}
    assert {"generation", "not_finite", "order", "age", "first", "shape", "state"} <= set(reasons)
    assert sum(len(life.world.arms.sent) for life in lives) > 4 * STEPS


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1040))
def test_no_interleaving_leads_beyond_a_limit_in_ten_times_as_many(seed: int):
    """10^5 steps."""
    interleave(seed, STEPS)


@pytest.mark.timeout(1200)  # by default it ends in a call of the driver, and counts as the driver's fault
def test_no_interleaving_over_sockets_leads_beyond_a_limit():
    """4,000 steps: a message each, with passes after it; among all else, nothing moves from a hold or clear to a go."""
    life = interleave_sockets(0, 4_000)
    assert life.replies > 2400
    assert life.refusals > 400
    assert set(life.states) == {"STOPPED", "HELD", "HOLD", "RUN", "MOVE", "BRAKE"}
    assert set(life.counts) >= {"reconnect", "killed", "second_actor", "of_another", "garbage", "stranger", "command",
                                "go", "take", "go_for_another", "hold", "clear"}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
def test_no_interleaving_over_sockets_leads_beyond_a_limit_in_ten_times_as_many(seed: int):
    """10^5 steps."""
    interleave_sockets(seed, 10_000)

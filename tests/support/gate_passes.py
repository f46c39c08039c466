"""Passes of a robot server's gate, each checked against every limit; profiles of limits, and goals of many kinds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from robot_limits import HIGH, HOME, LOW, J, limits

from serl_chunk_robot.control.pursuit import Pursuit
from serl_chunk_robot.safety.gate import SLOWED, Gate, Passed
from serl_chunk_robot.safety.motion import Limits, SetPoint, Workspace, braked

DT = 0.005
CLOSE = 1 + 1e-6
PROFILES = {  # velocity, acceleration, jerk, seconds of a pass
    "fake": (3.2, 40.0, 4000.0, 0.005),
    "first_day": (0.5, 4.0, 60.0, 0.005),
    "stiff": (6.0, 400.0, 1e5, 0.002),
    "slow_loop": (2.0, 15.0, 300.0, 0.02),
}
GOALS = ("jumps", "extremes", "beyond", "smooth", "noise", "held", "huge")


def profile(name: str, workspace: Workspace | None = None) -> tuple[Limits, float]:
    v, a, j, dt = PROFILES[name]
    return limits(v, a, j, workspace), dt


def goals(kind: str, rng: np.random.Generator, dt: float) -> Callable[[int], np.ndarray]:
    """The goal of each pass."""
    held = rng.uniform(LOW, HIGH)
    phase, size = rng.uniform(0, 6.28, J), rng.uniform(0.1, 2)

    def goal(k: int) -> np.ndarray:
        nonlocal held
        if kind == "jumps" and k % 20 == 0:
            held = rng.uniform(LOW, HIGH)
        elif kind == "extremes":
            held = (LOW, HIGH)[k // rng.integers(1, 9) % 2]
        elif kind == "beyond" and k % 30 == 0:
            held = rng.uniform(LOW - 2, HIGH + 2)
        elif kind == "smooth":
            held = HOME + size * np.sin(2 * k * dt + phase)
        elif kind == "noise" and k % 4 == 0:
            held = held + rng.normal(0, 0.05, J)
        elif kind == "huge":
            held = rng.choice([-1e300, -3.0, 0.0, 3.0, 1e300], J)
        return held

    return goal


def keeps(
    gate: Gate, at: SetPoint, goal: np.ndarray | None, measured: np.ndarray, low: np.ndarray, high: np.ndarray
) -> Passed:
    """One pass, and what must hold of it."""
    rates, dt = gate.limits.rates, gate.dt
    passed = gate.step(at, goal, measured)
    now = passed.set_point
    rounding = 2e-15 * (1 + np.abs(now.position)) / dt**3
    assert np.isfinite(now.position).all()
    assert (np.abs(now.velocity) <= rates.velocity * CLOSE).all()
    assert (np.abs(now.acceleration) <= rates.acceleration * CLOSE).all()
    assert (np.abs(now.acceleration - at.acceleration) / dt <= rates.jerk * CLOSE + rounding).all()
    assert (now.position >= low - 1e-8).all()
    assert (now.position <= high + 1e-8).all()
    assert np.array_equal((now.position - at.position) / dt, now.velocity)
    brake = braked(at, rates, dt).position
    if goal is None:
        assert np.array_equal(now.position, brake)
        return passed
    assert 0 <= passed.factor <= 1
    clipped = np.clip(goal, np.minimum(gate.limits.low, at.position), np.maximum(gate.limits.high, at.position))
    assert now.position == pytest.approx(brake + passed.factor * (clipped - brake), abs=1e-12)
    assert (passed.reason != "") == (passed.factor < 1 or not np.array_equal(clipped, goal))
    assert passed.reason in ("", *SLOWED)
    return passed


def ends(at: SetPoint, gate: Gate) -> SetPoint:
    while not at.stands:
        at = braked(at, gate.limits.rates, gate.dt)
    return at


class Pursued:
    """A gate that gets the places of a pursuit."""

    def __init__(self, gate: Gate) -> None:
        self.gate, self.pursuit = gate, Pursuit(gate.limits, gate.dt)
        self.follows = False  # in the last pass

    def keeps(self, at: SetPoint, goal: np.ndarray, measured: np.ndarray) -> Passed:
        """One pass towards `goal`, checked as `keeps` does."""
        low, high = np.minimum(LOW, at.position), np.maximum(HIGH, at.position)
        place, self.follows = self.pursuit.place(at, goal)
        passed = keeps(self.gate, at, place, measured, low, high)
        self.follows &= passed.factor == 1
        return passed

"""The place that the set point is to take in a pass: its goal, or the way back onto it.

Off its goal, as after a goal that jumped, the set point is the moving goal plus an offset of all joints that goes to
zero along a polynomial. All joints reach the goal in the same pass: from rest, the way to a goal that stands is
straight, and a joint that is on its goal stays there. The gate has the last word.
"""

from __future__ import annotations

from typing import Optional, Tuple, Union

import numpy as np

from serl_chunk_robot.safety.motion import Limits, SetPoint, braked, stopping_distance

Number = Union[int, np.ndarray]

LONGEST = 40.0  # s until the goal is reached
SHARE = np.array([0.97, 0.95, 0.9])  # of the limits of velocity, acceleration and jerk, with those of the goal
LEAST = 0.05  # of them, in addition to the goal's own
SHORTER = 0.8  # of what is left of a way, for another one to replace it
CLOSE = 1e-3  # of an offset
FORCED = 2.0  # times the way that a joint cannot but go away from its goal
HELD = 3  # passes on its goal, after which a joint moves as its goal does
SLACK = 1 + 1e-7  # of rounding
MOMENTS = np.linspace(0, 1, 14) ** 1.5  # of a way, where it is compared with the limits


class Pursuit:
    """Pure but for the goals and the way of earlier passes. `dt`: seconds of one pass of the loop."""

    def __init__(self, limits: Limits, dt: float) -> None:
        self._limits, self._dt = limits, dt
        lengths = [*range(1, 10)]
        while lengths[-1] * dt < LONGEST:
            lengths.append(round(lengths[-1] * 1.15))
        self._lengths = np.array(lengths)  # passes, int64[K]
        # Velocity, acceleration and jerk of a way per unit of its first offset and that one's differences.
        n = 1 + np.multiply.outer(self._lengths + 1, MOMENTS)
        self._offsets = np.array([[1, 0, 0], [1, -dt, 0], [1, -2 * dt, dt * dt]])  # now, a pass ago, two passes ago
        p = np.stack([offset(n - back, self._lengths[:, None], self._offsets[..., None, None]) for back in range(4)])
        self._spans = p[0].transpose(1, 2, 0)  # [K, S, 3]
        v = (p[:3] - p[1:]) / dt
        a = (v[:2] - v[1:]) / dt
        self._demands = np.stack([v[0], a[0], (a[0] - a[1]) / dt]).transpose(2, 0, 3, 1)  # [K, 3, S, 3]
        self.begin()

    def begin(self) -> None:
        """Forget earlier passes: the next goal is the first."""
        self._goal: Optional[np.ndarray] = None
        self._pace = np.zeros_like(self._limits.low)
        self._steady = np.zeros(len(self._pace), bool)
        self._held = np.zeros(len(self._pace), int)  # passes for which each joint has been on its goal
        self._place: Optional[np.ndarray] = None  # of the last pass
        self._slowed = False  # by the gate, or for want of a way: the set point may brake hard
        self._first, self._length, self._passed = np.zeros((3, 0)), 0, 0

    def place(self, at: SetPoint, goal: np.ndarray) -> Tuple[np.ndarray, bool]:
        """The place for the next set point, float64[J], and whether it is `goal`."""
        low, high = self._limits.low, self._limits.high
        inside = np.minimum(np.maximum(goal, np.minimum(low, at.position)), np.maximum(high, at.position))
        pace, bend = self._motion(at, inside)
        left = self._length - self._passed
        kept = False
        self._slowed |= self._place is not None and not np.array_equal(at.position, self._place)
        if self._place is not None and not self._slowed:
            self._passed += 1
            left = max(left - 1, 0)
            place = inside if left == 0 else inside + offset(self._passed, self._length, self._first)
            kept = bool(self._within(at, place).all())
        if not (kept and left == 0):
            length, first, good = self._way(at, inside, pace, bend)
            if not kept and not good:  # as to a goal that stands
                length, first, good = self._way(at, inside, np.zeros_like(pace), np.zeros_like(bend))
            if not kept and not good:
                self._place, self._slowed = braked(at, self._limits.rates, self._dt).position, True
                return self._place, False
            if not kept or (good and length <= SHORTER * left):
                self._first, self._length, self._passed, left = first, length, 1, length - 1
                self._slowed = False
                place = inside if left == 0 else inside + offset(1, length, first)
        self._place = place
        return (goal, True) if left == 0 else (place, False)

    def _motion(self, at: SetPoint, goal: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
        """Velocity and acceleration with which the goal goes on, float64[J]: 0 where it jumped."""
        rates, dt = self._limits.rates, self._dt
        before = goal if self._goal is None else self._goal
        self._held = np.where(at.position == before, self._held + 1, 0)
        pace = (goal - before) / dt
        steady = np.abs(pace) <= rates.velocity
        pace = np.where(steady, pace, 0.0)
        bend = (pace - self._pace) / dt
        bend = np.where(steady & self._steady & (np.abs(bend) <= rates.acceleration), bend, 0.0)
        self._goal, self._pace, self._steady = goal.copy(), pace, steady
        return pace, bend

    def _way(self, at: SetPoint, goal: np.ndarray, pace: np.ndarray, bend: np.ndarray) -> Tuple[int, np.ndarray, bool]:
        """The shortest way within the limits: its passes, its first offsets (see `offset`), and whether there is one
        that leads to the goal.
        """
        dt = self._dt
        first = np.stack([at.position - goal + pace * dt, at.velocity - pace + bend * dt, at.acceleration - bend])
        first[:, (self._held >= HELD) & self._within(at, goal)] = 0.0
        own = np.stack([pace, bend, np.zeros_like(pace)])
        limits = np.stack(self._limits.rates)
        limits = np.maximum(SHARE[:, None] * limits, np.abs(own) + LEAST * limits)
        demands = np.abs(self._demands @ first + own[:, None])  # [K, 3, S, J]
        worst = (demands.max(axis=2) / limits).max(axis=(1, 2))
        k = int((worst <= 1).argmax())
        # A joint that brakes hard would swing back as the way fades its acceleration out.
        side = np.sign(first[0])
        away = (side * (self._spans[k] @ first)).max(axis=0) - np.abs(first[0])
        forced = stopping_distance(side * first[1], side * first[2], self._limits.rates, dt)
        stays = not self._slowed or at.stands or (away <= FORCED * forced + CLOSE * np.abs(first[0])).all()
        good = bool(worst[k] <= 1 and stays)
        return int(self._lengths[k]), self._offsets @ first, good

    def _within(self, at: SetPoint, place: np.ndarray) -> np.ndarray:
        """Whether a pass to `place` is within the limits of velocity, acceleration and jerk, bool[J]."""
        rates, dt = self._limits.rates, self._dt
        step, coast = place - at.position, at.velocity * dt
        way = np.abs(np.stack([step, step - coast, step - coast - at.acceleration * dt * dt]))
        span = np.stack([rates.velocity * dt, rates.acceleration * dt**2, rates.jerk * dt**3])
        return (way <= span * SLACK).all(axis=0)


def offset(passed: Number, length: Number, first: np.ndarray) -> np.ndarray:
    """The offset after `passed` passes of a way of `length` passes; 0 there and for the two passes after that.

    `first`: offsets now, a pass ago and two passes ago, [3, ...].
    """

    def zeros(n: Number) -> Number:
        return (n - length) * (n - length - 1) * (n - length - 2)

    now, back, twice = first[0] / zeros(0), first[1] / zeros(-1), first[2] / zeros(-2)
    slope, bend = now - back, now - 2 * back + twice
    return zeros(passed) * (now + passed * slope + 0.5 * passed * (passed + 1) * bend)

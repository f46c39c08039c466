"""The gate: which commands are taken, and how far the set point moves in a pass of the loop.

A command is rejected whole, or the whole robot follows it more slowly: all joints of all arms by one factor, so that
arms that work together stay together. The factor mixes two set points, the one that is asked for and the one that
braking would reach. Braking from wherever the gate let the robot go stays within every limit. Which places to ask for,
so that the set point gets back onto its goal, is for the caller.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple, Optional, Tuple

import numpy as np

from serl_chunk_robot.geometry.kinematics import Arms
from serl_chunk_robot.safety.motion import Limits, SetPoint, braked, peak_speed, stopping_distance

CLOSE = 1e-9  # rad
SLACK = 1 + 1e-7  # of rounding
GRID = np.arange(1, 8) / 8  # factors that are tried where a limit that is no straight line is in the way, twice
REJECTIONS = ("shape", "not_finite", "order", "age", "generation", "first")
SLOWED = ("velocity", "acceleration", "jerk", "following", "limit", "workspace")


class Command(NamedTuple):
    """A target of all joints for the end of a tick. `age`: seconds since it was sent, as the server estimates it."""

    target: np.ndarray  # float64[J]
    number: int
    generation: int
    age: float = 0.0


class Passed(NamedTuple):
    """What the gate let through in one pass. `factor`: 1 where the robot follows its command; `reason` why not."""

    set_point: SetPoint
    factor: float
    reason: str


class _Ahead(NamedTuple):
    """What a pass may do: from `at` to a place between `brake` and `goal`."""

    at: SetPoint
    brake: np.ndarray
    goal: np.ndarray
    low: np.ndarray
    high: np.ndarray

    def after(self, factors: np.ndarray, dt: float) -> SetPoint:
        """The set points of factors float64[K], float64[K, J]."""
        position = self.brake + factors[:, None] * (self.goal - self.brake)
        position[factors == 1] = self.goal
        return self.at.to(position, dt)


class Gate:
    """Pure but for its counters and the last number: the same calls give the same answers.

    `dt`: seconds of one pass of the loop; `arms`: forward kinematics, where `limits.workspace` is to be kept.
    """

    def __init__(self, limits: Limits, dt: float, arms: Optional[Arms] = None) -> None:
        if limits.workspace is not None and arms is None:
            raise ValueError("a workspace needs the arms' kinematics")
        self.limits, self.dt, self._arms = limits, dt, arms
        self.counts: Counter[str] = Counter()
        self._number = -1

    def begin(self) -> None:
        """A controller has armed: its numbers begin anew."""
        self._number = -1

    def rejects(self, command: Command, at: SetPoint, *, generation: int, validity: float, first: bool) -> str:
        """Why `command` is not taken, of REJECTIONS; empty where it is. `first`: since the robot was armed."""
        reason = self._rejects(command, at, generation, validity, first)
        if reason:
            self.counts[reason] += 1
        else:
            self._number = command.number
        return reason

    def _rejects(self, command: Command, at: SetPoint, generation: int, validity: float, first: bool) -> str:
        target = command.target
        if not isinstance(target, np.ndarray) or target.shape != at.position.shape or target.dtype.kind != "f":
            return "shape"
        if not np.isfinite(target).all():
            return "not_finite"
        if command.generation != generation:
            return "generation"
        if not isinstance(command.number, int) or command.number <= self._number:
            return "order"
        if not -validity <= command.age <= validity:
            return "age"
        if first and (np.abs(target - at.position) > self.limits.first).any():
            return "first"
        return ""

    def step(self, at: SetPoint, goal: Optional[np.ndarray], measured: np.ndarray) -> Passed:
        """Move the set point towards `goal` as far as one pass may; None brakes. `measured`: the checked joints."""
        limits, dt = self.limits, self.dt
        brake = braked(at, limits.rates, dt)
        if goal is None:
            return Passed(brake, 0.0, "")
        # Outside a limit only inwards: ALOHA's sleeping pose lies on one.
        low, high = np.minimum(limits.low, at.position), np.maximum(limits.high, at.position)
        clipped = np.minimum(np.maximum(goal, low), high)
        ahead = _Ahead(at, brake.position, clipped, low, high)
        factor, reason = self._straight(ahead, measured)
        reason = reason or ("" if np.array_equal(clipped, goal) else "limit")
        why = self._hindered(ahead, np.array([factor]))[0]
        if why:
            reason, factor, step = str(why), 0.0, factor
            for _ in range(2):
                factors = factor + step * GRID
                free = factors[self._hindered(ahead, factors) == ""]
                factor, step = (float(free[-1]) if len(free) else factor), step * GRID[0]
        if reason:
            self.counts[reason] += 1
        passed = brake if factor == 0 else SetPoint(*(x[0] for x in ahead.after(np.array([factor]), dt)))
        return Passed(passed, factor, reason)

    def _straight(self, ahead: _Ahead, measured: np.ndarray) -> Tuple[float, str]:
        """The largest factor within the limits that are straight lines in the next position, and which one it was."""
        rates, dt, towards = self.limits.rates, self.dt, ahead.goal - ahead.brake
        drift = ahead.at.position + ahead.at.velocity * dt  # where the joints go without an acceleration
        coast = drift + ahead.at.acceleration * dt * dt  # and without a jerk
        centre = np.stack([ahead.at.position, drift, coast, measured])
        span = np.stack([rates.velocity * dt, rates.acceleration * dt**2, rates.jerk * dt**3, self.limits.following])
        room = np.where(towards > 0, 1, -1) * (centre - ahead.brake) + SLACK * span
        share = np.maximum(room, 0) / np.maximum(np.abs(towards), 1e-300)
        least = np.where(towards == 0, 1.0, share).min(axis=1)
        worst = int(least.argmin())
        return (1.0, "") if least[worst] >= 1 else (float(least[worst]), SLOWED[worst])

    def _hindered(self, ahead: _Ahead, factors: np.ndarray) -> np.ndarray:
        """Which limit a robot would pass that took each factor and braked from then on, str[K]; empty where none."""
        rates, dt = self.limits.rates, self.dt
        after = ahead.after(factors, dt)
        p, v, a = after
        peak = np.maximum(peak_speed(v, a, rates, dt), peak_speed(-v, -a, rates, dt))
        up, down = stopping_distance(v, a, rates, dt), stopping_distance(-v, -a, rates, dt)
        why = np.full(len(factors), "", "U9")
        why[(peak > rates.velocity * SLACK).any(axis=1)] = "velocity"
        why[((p + up > ahead.high + CLOSE) | (p - down < ahead.low - CLOSE)).any(axis=1)] = "limit"
        free = np.flatnonzero(why == "")
        if self.limits.workspace is not None and len(free):
            then = SetPoint(*(x[free] for x in after))
            why[free[self._leaves(ahead.at, then, np.maximum(up, down)[free])]] = "workspace"
        return why

    def _leaves(self, at: SetPoint, after: SetPoint, travel: np.ndarray) -> np.ndarray:
        """Whether a robot that goes from `at` to each set point and brakes then gets (further) outside, bool[K]."""
        assert self._arms is not None
        outside = self.outside(np.concatenate([at.position[None], after.position]))
        most = max(outside[0], 0.0) + 1e-12
        leaves = outside[1:] > most
        unsure = np.flatnonzero(~leaves & (outside[1:] + travel @ self._arms.levers > most))
        way = SetPoint(*(x[unsure] for x in after))
        path = [way.position]
        while not way.stands:
            way = braked(way, self.limits.rates, self.dt)
            path.append(way.position)
        leaves[unsure] = self.outside(np.concatenate(path)).reshape(len(path), -1).max(axis=0) > most
        return leaves

    def outside(self, poses: np.ndarray) -> np.ndarray:
        """How far each pose is outside the workspace, m, float64[N]; at most 0 inside."""
        space, arms = self.limits.workspace, self._arms
        assert space is not None and arms is not None  # noqa: PT018
        points = arms(poses)  # [A, N, P, 3]
        worst = np.maximum(space.low - points, points - space.high).max(axis=(0, 2, 3)) + space.radius
        for i in range(len(points)):
            for other in points[i + 1 :]:
                apart = points[i, :, :, None] - other[:, None]
                gaps = np.sqrt(np.einsum("npqx,npqx->npq", apart, apart).min(axis=(1, 2)))
                worst = np.maximum(worst, space.between_arms + 2 * space.radius - gaps)
        return worst

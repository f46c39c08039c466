"""How a motion of the server's own yields to what it met: back along its way, until nothing presses any more."""

from __future__ import annotations

from collections import deque
from typing import Deque, Generator, Optional, Sequence, Tuple

import numpy as np

from serl_chunk_robot.control.own_motion import Resistance
from serl_chunk_robot.drivers.base import Reading
from serl_chunk_robot.safety.limits import Limits
from serl_chunk_robot.safety.motion import SetPoint

SHARE = 0.9  # of the profile's velocity, on the way back
RAMP = 0.25  # s up to that speed, and down to rest: most ways back are shorter
SETTLES = 0.1  # s that the robot stands before its efforts are judged for good
PATIENCE = 5.0  # s longer than the way back takes, after which it is given up
# Shares of a limit: what is relaxed; by how much what a joint bore may differ; what motion may add to both.
RELAXED, NOISE, MOVES = 0.5, 0.02, 0.1
FURTHER = 0.02  # s at the profile's velocity, that it goes on where it does not stand relaxed
APART = 0.004  # s at the profile's velocity, between two remembered places
PLACES = 20_000  # that are remembered
BEHIND = 0.1  # s at the profile's velocity: a set point that the gate keeps further behind is waited for

_Pass = Tuple[SetPoint, Reading, float]


class Yielding:
    """A motion that ends with Resistance, but goes back first. Subclasses define `advance`.

    All joints but the grippers go back, as far as the motion has led them at most. They stop once no joint presses by
    more than half its limit of effort, nor hangs behind its set point by more than half of `following`. What a joint
    bore while it stood before the motion, as gravity, is no reason to go back.

    Args:
        effort: limits, float64[J], of either sign; None: there is nothing to yield to.
        grippers: joints that keep their set points.
    """

    pressing = ""  # which joint presses, and how hard, while the robot goes back
    waiting = False  # for the operator

    def __init__(self, limits: Limits, effort: Optional[np.ndarray], grippers: Sequence[int]) -> None:
        self._limits, self._effort = limits, effort
        self._joints = ~np.isin(np.arange(len(limits.low)), grippers)
        self._trail: Deque[np.ndarray] = deque(maxlen=PLACES)
        self._bore: Optional[np.ndarray] = None  # shares of the limits, [2, J]
        self._back: Optional[Generator[Optional[np.ndarray], _Pass, None]] = None

    def advance(self, at: SetPoint, reading: Reading, now: float) -> Optional[np.ndarray]:
        """The next goal; see `own_motion.Motion`."""
        raise NotImplementedError

    def goal(self, at: SetPoint, reading: Reading, now: float) -> Optional[np.ndarray]:
        """The next goal, float64[J]; None once the motion is done. Raises Resistance when the robot has gone back."""
        if self._effort is None:
            return self.advance(at, reading, now)
        if self._back is not None:
            return self._back.send((at, reading, now))
        if self._bore is None:
            self._bore = self._loads(at, reading)
        self._remember(at)
        try:
            _check_effort(self._effort, reading)
            return self.advance(at, reading, now)
        except Resistance as e:
            self.pressing, self.waiting = str(e), False
            self._back = self._go_back((at, reading, now))
            return next(self._back)

    def _remember(self, at: SetPoint) -> None:
        # A place near the last one replaces it, unless that was far from the one before.
        if len(self._trail) > 1 and self._length(self._trail[-1] - self._trail[-2]) < APART:
            self._trail.pop()
        self._trail.append(at.position)

    def _length(self, way: np.ndarray) -> float:
        """Seconds of a straight way at the velocity of the profile."""
        return float(np.abs(way / self._limits.rates.velocity)[self._joints].max(initial=0.0))

    def _loads(self, at: SetPoint, reading: Reading) -> np.ndarray:
        apart = (reading.q - at.position) / self._limits.following
        return np.where(self._joints, np.abs(np.stack([reading.effort / self._effort, apart])), 0.0)

    def _pressing(self, reading: Reading) -> np.ndarray:
        """The signs of the efforts that are above their limits, of joints, float64[J]."""
        assert self._effort is not None
        return np.where(self._joints & (np.abs(reading.effort) > self._effort), np.sign(reading.effort), 0.0)

    def _go_back(self, now: _Pass) -> Generator[Optional[np.ndarray], _Pass, None]:
        """Brake, lead all joints back, and raise Resistance."""
        at, reading, moment = now
        while not at.stands:
            self._remember(at)
            at, reading, moment = yield None
        self._remember(at)
        way = np.stack(self._trail)[::-1]
        way[:, ~self._joints] = at.position[~self._joints]
        steps = np.abs(np.diff(way, axis=0) / self._limits.rates.velocity)
        places = np.concatenate([[0.0], np.cumsum(steps.max(axis=1, initial=0.0))])
        end, first, goal, gone, rate = float(places[-1]), self._pressing(reading), way[0], 0.0, 0.0
        assert self._bore is not None
        bearable, least, slows = np.maximum(RELAXED, self._bore + NOISE), 0.0, False
        stood, last, gives_up = moment, moment, moment + end / SHARE + PATIENCE
        while True:
            loads, pressing = self._loads(at, reading), self._pressing(reading)
            other = (pressing != 0) & (pressing != first)
            if other.any():
                joint = int(np.argmax(other))
                raise Resistance(f"{self.pressing}; joint {joint} on the way back: effort {reading.effort[joint]:.2f}")
            if moment > gives_up:
                raise Resistance(f"{self.pressing}; the profile's limits keep it from going back")
            slows |= gone >= least and bool((loads <= bearable + MOVES).all())
            if not (at.stands and rate == 0 and (slows or gone >= end)):
                stood = moment
            elif moment - stood >= SETTLES:
                if (loads <= bearable).all():
                    raise Resistance(self.pressing + ("; gone back until relaxed" if gone else ""))
                if gone >= end:
                    raise Resistance(self.pressing + "; it still does where the motion began")
                slows, least = False, gone + FURTHER
            passed, last = moment - last, moment
            if self._length(at.position - goal) < BEHIND:
                change = SHARE / RAMP * passed
                rate = max(rate - change, 0.0) if slows else min(rate + change, SHARE)
                rate = min(rate, float(np.sqrt(2 * SHARE / RAMP * (end - gone))))
                gone = min(gone + rate * passed, end)
                rate = rate if gone < end else 0.0
                goal = _between(way, places, gone)
            at, reading, moment = yield goal


def _between(way: np.ndarray, places: np.ndarray, gone: float) -> np.ndarray:
    """The place of `way`, float64[K, J], at `gone` of its `places`, float64[K]."""
    k = min(int(np.searchsorted(places, gone, side="right")), len(way) - 1)
    if k == 0:
        return way[0]
    share = min((gone - places[k - 1]) / max(places[k] - places[k - 1], 1e-300), 1.0)
    return way[k - 1] + share * (way[k] - way[k - 1])  # type: ignore[no-any-return]


def _check_effort(limit: np.ndarray, reading: Reading) -> None:
    """Raise Resistance for an effort of either sign above the limit."""
    over = np.abs(reading.effort) - limit
    if (over > 0).any():
        joint = int(np.argmax(over))
        raise Resistance(f"joint {joint} presses: effort {reading.effort[joint]:.2f}, limit {limit[joint]:g}")

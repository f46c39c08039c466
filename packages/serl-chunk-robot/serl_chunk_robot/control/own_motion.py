"""The server's own motion in the state MOVE, and the end of the day that it may lead to."""

from __future__ import annotations

from collections import deque
from typing import Callable, Deque, Generator, List, Optional, Protocol, Sequence, Tuple

import numpy as np

from serl_chunk_robot.drivers.base import Reading
from serl_chunk_robot.safety.measured import Measured
from serl_chunk_robot.safety.motion import Limits, SetPoint

PARKED, PARKED_WITHIN = 0.05, 1.0  # rad of each joint but grippers, and s until they are there, before torque goes off
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


class Resistance(Exception):
    """Raised by a motion that met an effort above its limit: the robot brakes to HOLD."""


class Motion(Protocol):
    """A motion of the server's own, in the state MOVE."""

    def goal(self, at: SetPoint, reading: Reading, now: float) -> Optional[np.ndarray]:
        """The next goal, float64[J]; None once the motion is done, and then at every call. Raises Resistance."""


class OwnMotion:
    """The motion that is in progress, from the request for it to the next transition of the robot.

    `measured`: by which arms count as parked; `grippers`: joints that may be anywhere then.
    """

    def __init__(self, measured: Measured, grippers: List[int]) -> None:
        self.number = self.done = 0  # of the newest motion, and of the newest one that went as planned
        self.ends: Optional[Tuple[str, np.ndarray]] = None  # who ends the day, and the pose, float64[J], for it
        self._measured, self._grippers = measured, grippers
        self._motion: Optional[Motion] = None
        self._ended_at: Optional[float] = None  # when the set point was in the pose

    def begin(self, motion: Optional[Motion], ends: Optional[Tuple[str, np.ndarray]]) -> None:
        self.number += 1
        self._motion, self.ends, self._ended_at = motion, ends, None

    def drop(self) -> None:
        self._motion = self.ends = None

    @property
    def pressing(self) -> str:
        """Which joint presses, and how hard, while the robot goes back; else empty."""
        return str(getattr(self._motion, "pressing", ""))

    @property
    def waiting(self) -> bool:
        return bool(getattr(self._motion, "waiting", False))

    def proceed(self) -> bool:
        proceed = getattr(self._motion, "proceed", None)
        return proceed is not None and bool(proceed())

    def goal(self, at: SetPoint, reading: Reading, now: float) -> Optional[np.ndarray]:
        """The motion's next goal; None once it is done. Raises what the motion raises, and ValueError."""
        goal = None if self._motion is None else self._motion.goal(at, reading, now)
        if goal is not None and not (goal.shape == at.position.shape and np.isfinite(goal).all()):
            raise ValueError(f"its goal is not {at.position.size} finite numbers")
        return goal

    def parked(self, now: float) -> bool:
        """Whether nothing more is waited for: the arms are measured in the pose, or did not get there in time."""
        if self.ends is None:
            return True
        self._ended_at = now if self._ended_at is None else self._ended_at
        return not self.apart() or now - self._ended_at > PARKED_WITHIN

    def apart(self) -> str:
        """Which joint is measured away from the pose for the end of the day; empty where none is."""
        if self.ends is None:
            return ""
        good = self._measured.good
        if good is None or self._measured.doubtful:
            return "the measured state cannot be trusted"
        apart = np.abs(good.q - self.ends[1])
        apart[self._grippers] = 0.0
        joint = int(np.argmax(apart))
        return f"joint {joint} is measured {apart[joint]:.3f} away from the pose" if apart[joint] > PARKED else ""


class Yielding:
    """A motion that ends with Resistance, but goes back first. Subclasses define `advance`.

    All joints but the grippers go back, as far as the motion has led them at most. They stop once no joint presses by
    more than half its limit of effort, nor hangs behind its set point by more than half of `following`. What a joint
    bore while it stood before the motion, as gravity, is no reason to go back.

    Args:
        effort: limits, float64[J], of either sign; None: there is nothing to yield to.
        grippers: joints that keep their set points.
        beep: called once, before the robot moves.
        stands: seconds that it stands after the beep.
    """

    pressing = ""  # which joint presses, and how hard, while the robot goes back
    waiting = False  # for the operator

    def __init__(
        self, limits: Limits, effort: Optional[np.ndarray], grippers: Sequence[int], beep: Callable[[], None],
        stands: float,
    ) -> None:  # fmt: skip
        self._limits, self._effort, self._beep, self._stands = limits, effort, beep, stands
        self._begins: Optional[float] = None  # when it moves
        self._joints = ~np.isin(np.arange(len(limits.low)), grippers)
        self._trail: Deque[np.ndarray] = deque(maxlen=PLACES)
        self._bore: Optional[np.ndarray] = None  # shares of the limits, [2, J]
        self._back: Optional[Generator[Optional[np.ndarray], _Pass, None]] = None

    def advance(self, at: SetPoint, reading: Reading, since: float, now: float) -> Optional[np.ndarray]:
        """Return the next goal, float64[J], `since` s after the motion began; None once it is done."""
        raise NotImplementedError

    def goal(self, at: SetPoint, reading: Reading, now: float) -> Optional[np.ndarray]:
        """The next goal, float64[J]; None once the motion is done. Raises Resistance when the robot has gone back."""
        if self._effort is None:
            return self._next(at, reading, now)
        if self._back is not None:
            return self._back.send((at, reading, now))
        if self._bore is None:
            self._bore = self._loads(at, reading)
        self._remember(at)
        try:
            over = np.abs(reading.effort) - self._effort
            if (over > 0).any():
                j = int(np.argmax(over))
                raise Resistance(f"joint {j} presses: effort {reading.effort[j]:.2f}, limit {self._effort[j]:g}")
            return self._next(at, reading, now)
        except Resistance as e:
            self.pressing, self.waiting = str(e), False
            self._back = self._go_back((at, reading, now))
            return next(self._back)

    def _next(self, at: SetPoint, reading: Reading, now: float) -> Optional[np.ndarray]:
        if self._begins is None:
            self._begins = now + self._stands
            self._beep()
        return at.position if now < self._begins else self.advance(at, reading, now - self._begins, now)

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

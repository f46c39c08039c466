"""The path to the target of a command, on which the loop leads the robot from tick to tick."""

from __future__ import annotations

from typing import Optional

import numpy as np

EARLY = 1.5  # passes that a command may come before the one before it was reached, and wait for that


class Track:
    """The path to the target of a command: a cubic, from where and how fast the path before it was.

    It leads on from the path and not from the set point, which catches up with it after it was slowed (`Pursuit`).
    Moments are those of passes, s: a pass that comes late advances the path no further than one in time. The speed at
    the end is that of a steady acceleration through the last three targets, so that targets on a parabola are followed
    on it. A joint that would need an unbounded acceleration for that goes on at its mean speed, or stands if it turns.

    Args:
        start: where the path begins that has none before it, float64[J].
        began: when the set point is where it is.
        before: the track that this one replaces, if the robot was armed no later.
        acceleration: the largest, float64[J].
    """

    def __init__(
        self, start: np.ndarray, target: np.ndarray, began: float, *,
        tick: float, dt: float, before: Optional[Track], acceleration: np.ndarray,
    ) -> None:  # fmt: skip
        self.target, self.end, self._began = target, began + tick, began
        self._p0, self._step = start, target - start
        self._v0 = self._v1 = np.zeros_like(target)  # per second
        if before is not None:
            # A jitter buffer: a late command moves the ends of ticks, an early one waits for the end of its tick.
            if 0.0 <= before.end - began + 1e-9 <= min(EARLY * dt, 0.5 * tick):
                self.end = before.end + tick
            self._p0, self._v0 = before.goal(began), before.speed(began)
            self._step, last = (target - before.target) / max(round((self.end - before.end) / tick), 1), before._step
            change = self._step - last
            mean = np.where(self._step * last > 0, self._step, 0.0)
            self._v1 = np.where(np.abs(change) <= acceleration * tick**2, self._step + 0.5 * change, mean) / tick
        self._seconds = self.end - began

    def goal(self, moment: float) -> np.ndarray:
        """The point of the path at `moment`, float64[J]; its end from then on."""
        s = self._share(moment)
        if s == 1:
            return self.target
        r = 1.0 - s
        return (self._p0 * (r * r * (1 + 2 * s)) + self.target * (s * s * (1 + 2 * r))
                + (self._v0 * (s * r * r) - self._v1 * (s * s * r)) * self._seconds)  # fmt: skip

    def speed(self, moment: float) -> np.ndarray:
        """The speed of the path at `moment`, float64[J]; that of its end from then on."""
        s = self._share(moment)
        r = 1.0 - s
        chord = (self.target - self._p0) * (6 * s * r / self._seconds)
        return chord + self._v0 * (r * (1 - 3 * s)) + self._v1 * (s * (3 * s - 2))

    def _share(self, moment: float) -> float:
        s = (moment - self._began) / self._seconds
        return s if s < 1 - 1e-9 else 1.0

"""The commands of a controller, and the path that their targets make, on which the loop leads the robot."""

from __future__ import annotations

from typing import Optional

import numpy as np

from serl_chunk_robot.safety.gate import Command, Gate
from serl_chunk_robot.safety.motion import SetPoint
from serl_chunk_robot.safety.watchdog import Watchdog

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


class Commands:
    """What was taken of a controller's commands since it armed.

    `watchdog`: notes when a command was taken or rejected; `tick`: seconds of a control tick.
    """

    def __init__(self, gate: Gate, watchdog: Watchdog, tick: float) -> None:
        self.number = -1  # of the newest that was taken
        self.rejection = ""  # of the newest that was not
        self._gate, self._watchdog, self._tick = gate, watchdog, tick
        self._track: Optional[Track] = None  # since the robot was armed
        self._due = 0.0  # when the arms are to be at the set point: seconds of passes since the first

    def begin(self, now: float) -> None:
        self._gate.begin()
        self.number = -1
        self._watchdog.armed(now)

    def drop(self) -> None:
        """Forget the path: the robot is in another state, or of another generation."""
        self._track = None

    def take(self, command: Command, at: SetPoint, now: float, generation: int) -> str:
        """Take a command from the set point `at` on, or return the gate's reason why not."""
        reason = self._gate.rejects(
            command, at, generation=generation, validity=self._watchdog.validity, first=self._track is None
        )
        if reason:
            self.rejection = reason
            self._watchdog.rejected()
            return reason
        self._watchdog.commanded(now)
        self._track = Track(
            at.position, np.array(command.target, np.float64), self._due, tick=self._tick, dt=self._gate.dt,
            before=self._track, acceleration=self._gate.limits.rates.acceleration,
        )  # fmt: skip
        self.number = command.number
        return ""

    def goal(self, at: SetPoint) -> np.ndarray:
        """Return where the path leads in this pass, float64[J]; the set point before the first command."""
        return at.position if self._track is None else self._track.goal(self._due + self._gate.dt)

    def passed(self) -> None:
        """A set point was sent: the path goes on by a pass."""
        self._due += self._gate.dt

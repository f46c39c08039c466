"""The server's own motion in the state MOVE, and the end of the day that it may lead to."""

from __future__ import annotations

from typing import List, Optional, Protocol, Tuple

import numpy as np

from serl_chunk_robot.drivers.base import Reading
from serl_chunk_robot.safety.measured import Measured
from serl_chunk_robot.safety.motion import SetPoint

PARKED, PARKED_WITHIN = 0.05, 1.0  # rad of each joint but grippers, and s until they are there, before torque goes off


class Resistance(Exception):
    """Raised by a motion that met an effort above its limit: the robot brakes to HOLD."""


class Motion(Protocol):
    """A motion of the server's own, in the state MOVE."""

    def goal(self, at: SetPoint, reading: Reading, now: float) -> Optional[np.ndarray]:
        """The next goal, float64[J]; None once the motion is done, and then at every call. Raises Resistance."""


class OwnMotion:
    """The motion that is in progress, from the request for it to the next transition of the robot.

    Args:
        measured: by which arms count as parked.
        grippers: joints that may be anywhere then.
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

"""Neutral first: a device commands nothing until it was at rest for a moment.

A mouse that is held deflected through a stop, a clear and "go on" would move the robot at once, and a leader arm that
is elsewhere than its follower would let it jump.
"""

from __future__ import annotations

import math
from typing import Optional

import numpy as np

from serl_chunk_robot.devices.base import NEUTRAL, SILENT, Sample

RESTS = 0.3  # s
APART = 0.05  # rad, of a leader from its follower, and as much of a gripper's opening


class NeutralFirst:
    """Whether one device counts. Pure: all times are the caller's.

    It counts once it has been neutral for 0.3 s: each number of its twist below 0.02, no button pressed, and each joint
    of a leader within 0.05 of its follower's. It counts no more from `restart()` on, which the caller owes each start,
    arm, stop, clear and change of the robot's controller, nor from the first reading on that is not alive or is older
    than 0.2 s. A leader that is driven counts no more either: its motors move it, and no hand does. Looks more than
    0.2 s apart do not show what the device did meanwhile, and count as silence.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Require the device to be neutral again."""
        self._admitted = False
        self._since: Optional[float] = None  # neutral since then
        self._looked = -math.inf

    def admit(self, sample: Sample, now: float, follower: Optional[np.ndarray] = None) -> bool:
        """Take in a reading, once a tick, and return whether the device counts.

        Args:
            sample: of this device.
            now: monotonic s, on the clock of the reading's stamp.
            follower: float64[J], measured joints of a leader's follower; NaN: not compared. Other devices have none.

        Raises ValueError: a leader without a follower of as many joints.
        """
        shape = None if follower is None else follower.shape
        if sample.joints is not None and shape != sample.joints.shape:
            raise ValueError(f"follower: shape {shape}, expected {sample.joints.shape}")
        driven = sample.drive is not None and sample.drive.going
        silent = not sample.alive or now - sample.stamp > SILENT or driven
        if silent or now - self._looked > SILENT:
            self.restart()
        self._looked = now
        if silent:
            return False
        if not self._admitted:
            if not _is_neutral(sample, follower):
                self._since = None
            elif self._since is None:
                self._since = now
            self._admitted = self._since is not None and now - self._since >= RESTS
        return self._admitted


def _is_neutral(sample: Sample, follower: Optional[np.ndarray]) -> bool:
    if any(sample.buttons):
        return False
    if sample.twist is not None and not (np.abs(sample.twist) < NEUTRAL).all():  # also where it is no number
        return False
    if sample.joints is None or follower is None:
        return True
    return bool((np.abs(sample.joints - follower) <= APART)[~np.isnan(follower)].all())

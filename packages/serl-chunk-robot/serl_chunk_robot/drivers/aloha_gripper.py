"""The crank of ViperX grippers.

A gripper is measured as the position of its finger (m), and commanded as the angle of its motor (rad). Both are one
unit here: the opening, 0 for fingers at `finger(closed)` and 1 at `finger(open)`. A crank of 22 mm and a rod of 36 mm
connect them: finger = crank * sin(angle) + sqrt(rod^2 - (crank * cos(angle))^2). An opening is what ALOHA's own
recordings have as the gripper's state; their actions are shares of the angle, which differ from it in mid-range.
"""

from __future__ import annotations

import math
from typing import NamedTuple

CRANK, ROD = 0.022, 0.036  # m


class Gripper(NamedTuple):
    """Angles of a gripper's motor, rad, at which its fingers are closed and open."""

    closed: float
    open: float

    def opening(self, finger: float) -> float:
        """Return the opening of a finger at a position, m."""
        closed, opened = finger_at(self.closed), finger_at(self.open)
        return (finger - closed) / (opened - closed)

    def speed(self, angle: float, velocity: float) -> float:
        """Return openings per second at a motor's angle, rad, and velocity, rad/s."""
        rod = math.sqrt(ROD**2 - (CRANK * math.cos(angle)) ** 2)
        slope = CRANK * math.cos(angle) * (1 + CRANK * math.sin(angle) / rod)
        return slope * velocity / (finger_at(self.open) - finger_at(self.closed))

    def angle(self, opening: float) -> float:
        """Return the motor's angle of an opening, clipped to [0, 1]."""
        closed, opened = finger_at(self.closed), finger_at(self.open)
        finger = closed + min(max(opening, 0.0), 1.0) * (opened - closed)
        return math.asin(min((CRANK**2 + finger**2 - ROD**2) / (2 * CRANK * finger), 1.0))


def finger_at(angle: float) -> float:
    """Return the position of a finger, m, at a motor's angle, rad."""
    return CRANK * math.sin(angle) + math.sqrt(ROD**2 - (CRANK * math.cos(angle)) ** 2)

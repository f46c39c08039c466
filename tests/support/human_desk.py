"""Input devices whose deflection and buttons a test sets, on a clock of its own."""

from __future__ import annotations

import numpy as np

from serl_chunk_robot.devices.base import Sample


class Mouse:
    """A device whose deflection along x and whose buttons are set."""

    def __init__(self, name: str, clock: Clock) -> None:
        self.name, self._clock = name, clock
        self.push, self.buttons, self.alive, self.closed = 0.0, (False, False, False), True, False

    def read(self) -> Sample:
        twist = np.array([self.push * self.alive, 0, 0, 0, 0, 0])
        return Sample(twist, None, self.buttons if self.alive else (False,) * 3, self._clock.now, self.alive)

    def close(self) -> None:
        self.closed = True


class Clock:
    now = 100.0

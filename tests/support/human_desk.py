"""Input devices whose deflection and buttons a test sets, on a clock of its own, and the loop that polls them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from serl_chunk.devices.human import HumanIntervention, Thresholds
from serl_chunk.robots.base import InterventionCommand
from serl_chunk.types import STATE
from serl_chunk_robot.devices.base import Sample


class Clock:
    now = 100.0


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


class Leader(Mouse):
    def __init__(self, name: str, clock: Clock) -> None:
        super().__init__(name, clock)
        self.joints = np.array([1.0, -1.0, 0.5])

    def read(self) -> Sample:
        return Sample(None, self.joints.copy(), (), self._clock.now, self.alive)


class Desk:
    """Devices with their arms, and the loop. `last`: the command that was accepted; `measured`: None if it is that."""

    measured: np.ndarray | None = None

    def __init__(self, arms: Sequence[tuple[Any, Any]], thresholds: Thresholds, size: int) -> None:
        self.human = HumanIntervention(arms, thresholds, now=lambda: self.clock.now)
        self.last = np.zeros(size, np.float32)
        self.human.reset(0)

    @cached_property
    def clock(self) -> Clock:
        return Clock()

    def mice(self, *names: str) -> list[Mouse]:
        return [Mouse(name, self.clock) for name in names]

    def tick(self, seconds: float) -> InterventionCommand | None:
        self.clock.now += seconds
        state = self.last if self.measured is None else self.measured
        return self.human.poll(0, {STATE: state}, False, self.last)

"""Braking with nothing of the loop, once the loop itself has failed."""

from __future__ import annotations

from typing import Callable, Optional

import numpy as np

from serl_chunk_robot.border import Border
from serl_chunk_robot.driver import DriverError
from serl_chunk_robot.safety.motion import Rates, SetPoint, braked

FAILURES = 20  # set points in a row that the driver does not take, until braking is given up


def brake_alone(
    driver: Border, at: SetPoint, rates: Rates, dt: float, until: float, gap: float,
    clock: Callable[[], float], pause: Callable[[], None],
) -> Optional[SetPoint]:  # fmt: skip
    """Command set points until they stand, by `braked` alone.

    Args:
        until: moment of `clock` up to which the first set point goes on from `at`; later it stands there at once.
        gap: seconds after a set point, for which the same holds of the next one.
        pause: waits until the next set point is due.

    Returns:
        The set point that stands; None where the driver does not take any.
    """
    failures = 0
    while not at.stands:
        after = braked(at, rates, dt) if clock() <= until else SetPoint.standing(np.array(at.position))
        try:
            driver.command(after.position.copy(), dt)
            at, failures = after, 0
        except DriverError:
            failures += 1
        if failures >= FAILURES:
            return None
        until = clock() + gap
        pause()
    return at

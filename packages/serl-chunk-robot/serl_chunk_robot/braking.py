"""Braking with nothing of the loop, once the loop itself has failed."""

from __future__ import annotations

from typing import Callable, Optional

from serl_chunk_robot.border import Border
from serl_chunk_robot.driver import DriverError
from serl_chunk_robot.safety.motion import Rates, SetPoint, braked

FAILURES = 20  # set points in a row that the driver does not take, until braking is given up


def brake_alone(
    driver: Border, at: SetPoint, rates: Rates, dt: float, began: float, gap: float,
    clock: Callable[[], float], pause: Callable[[], None],
) -> Optional[SetPoint]:  # fmt: skip
    """Command set points until they stand, by `braked` alone.

    Args:
        began: moment of `clock` of the pass that failed.
        gap: seconds since then, or between two set points, after which the next one stands at once.
        pause: waits until the next set point is due.

    Returns:
        The set point that stands; None where the driver does not take any.
    """
    failures = 0
    while not at.stands:
        before, began = began, clock()
        after = braked(at, rates, dt) if began - before <= gap else SetPoint.standing(at.position)
        try:
            driver.command(after.position.copy(), dt)
            at, failures = after, 0
        except DriverError:
            failures += 1
        if failures >= FAILURES:
            return None
        pause()
    return at

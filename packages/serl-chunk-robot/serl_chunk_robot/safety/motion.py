"""The set point of all joints, how it brakes, by a jerk-limited deceleration, and its limits under one profile.

Velocities, accelerations and jerks are differences of set points over one pass of the loop, so that a limit holds for
what the driver receives, whatever the arms make of it.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

import numpy as np

REST = 1e-6  # of a pass of the largest jerk or acceleration: what still counts as standing


class SetPoint(NamedTuple):
    """What the driver was commanded last, float64[J]: rad or a gripper's own unit, and its differences per second."""

    position: np.ndarray
    velocity: np.ndarray
    acceleration: np.ndarray

    @classmethod
    def standing(cls, position: np.ndarray) -> SetPoint:
        position = np.array(position, np.float64)
        return cls(position, np.zeros_like(position), np.zeros_like(position))

    def to(self, position: np.ndarray, dt: float) -> SetPoint:
        """The set point after a pass of `dt` seconds that commands `position`."""
        velocity = (position - self.position) / dt
        return SetPoint(position, velocity, (velocity - self.velocity) / dt)

    @property
    def stands(self) -> bool:
        return not (self.velocity.any() or self.acceleration.any())


class Rates(NamedTuple):
    """Largest velocity, acceleration and jerk of each joint, float64[J], per second, squared, cubed."""

    velocity: np.ndarray
    acceleration: np.ndarray
    jerk: np.ndarray


def braked(at: SetPoint, rates: Rates, dt: float) -> SetPoint:
    """The next set point of a robot that decelerates as hard as acceleration and jerk allow, and then stands.

    The deceleration follows sqrt(jerk * speed) towards the end, which leaves it without a jump. A joint that was
    about to turn round goes a little past the turn.
    """
    speed = np.abs(at.velocity)
    change = rates.jerk * dt
    wanted = np.minimum(np.minimum(rates.acceleration, np.sqrt(rates.jerk * speed)), speed / dt)
    missing = np.copysign(wanted, -at.velocity) - at.acceleration
    acceleration = at.acceleration + np.minimum(np.maximum(missing, -change), change)
    velocity = at.velocity + acceleration * dt
    # The rest that rounding leaves, where the joint may also stay: the largest jerk undoes its acceleration.
    ends = np.abs(velocity) <= REST * dt * np.minimum(change, rates.acceleration)
    velocity[ends & (np.abs(acceleration) <= change * (1 + REST))] = 0.0
    return at.to(at.position + velocity * dt, dt)


def peak_speed(velocity: np.ndarray, acceleration: np.ndarray, rates: Rates, dt: float) -> np.ndarray:
    """Largest velocity towards + that a joint reaches before its deceleration begins; 0 where it never gets there."""
    change = rates.jerk * dt
    rising = np.maximum(acceleration - 0.5 * change, 0.0)
    return np.maximum(velocity + rising * rising / (2 * rates.jerk), 0.0)


def stopping_distance(velocity: np.ndarray, acceleration: np.ndarray, rates: Rates, dt: float) -> np.ndarray:
    """A bound of how far towards + a joint still travels under `braked`, float64[J]; 0 where it moves the other way.

    Of the peak u: the way up to it; u^2 / 2a at full deceleration; 1.1 u r for the ramps (r: a / j, less where u is too
    small for full deceleration); and half a pass. A joint that stands after the next pass goes no further.
    """
    stop, change = velocity / dt, rates.jerk * dt
    at_once = (np.abs(stop) <= np.minimum(rates.acceleration, change)) & (np.abs(stop + acceleration) <= change)
    u = peak_speed(velocity, acceleration, rates, dt)
    ramp = np.minimum(rates.acceleration / rates.jerk, np.sqrt(u / rates.jerk))
    rise = np.maximum(acceleration, 0.0) / rates.jerk
    return np.where(at_once, 0.0, u * (rise + u / (2 * rates.acceleration) + 1.1 * ramp + 0.5 * dt))


class Workspace(NamedTuple):
    """Where an arm's points may be, metres in the world: a box, whose floor is the table, and the arms' distance.

    `radius` is that of the sphere around each point of the arm.
    """

    low: np.ndarray  # float64[3]
    high: np.ndarray
    between_arms: float = 0.0
    radius: float = 0.0


class GripLimits(NamedTuple):
    """Of the grippers, in a profile. Other joints, and grippers without a limit, have an infinite effort."""

    effort: np.ndarray  # float64[J], of either sign
    seconds: float = 10.0


class Limits(NamedTuple):
    """Of J joints, all arms together, in the order of the command; arrays are float64[J]."""

    low: np.ndarray  # rad, or a gripper's own unit
    high: np.ndarray
    rates: Rates
    following: np.ndarray  # largest distance of the set point from the measured joint
    first: np.ndarray  # largest distance of a first command from the set point
    overspeed: np.ndarray  # measured velocity that stops the robot
    workspace: Optional[Workspace] = None
    grip: Optional[GripLimits] = None  # the gate does not read it

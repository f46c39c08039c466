"""Simulated arms without a simulator: joints that follow their targets with a first-order lag."""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional

import numpy as np

from serl_chunk_robot.drivers.base import Driver, DriverError, DriverSpec, Reading, equal_arms, sendable

STIFFNESS = 20.0  # effort per rad between the target and the joint
PRESSES = 3.0  # the limit of effort, in addition to what a joint needs for its fastest motion
SINKS = 0.5  # s: of an arm without torque, on its way to its rest pose

# One ViperX with six joints and a gripper.
LOW = (-3.14, -1.85, -1.76, -3.14, -1.87, -3.14, 0.0)
HIGH = (3.14, 1.26, 1.6, 3.14, 2.23, 3.14, 1.0)
VELOCITY = (3.2,) * 6 + (10.0,)
HOME = (0.0, -0.96, 1.16, 0.0, -0.3, 0.0, 0.5)
SAG = (0.0, 0.4, -0.3, 0.0, 0.2, 0.0, 0.0)  # of an arm without torque


class FakeArms(Driver):
    """Arms in simulated time: that of the clock given to `connect`.

    An arm without torque sinks towards `rest`.

    Args:
        start: pose of all joints at connection, float64[J]. Torque is on.
        lag: seconds in which the joints make 63 % of the way to their targets.
        rest: pose of arms without torque, float64[J]; default: `start`.
    """

    def __init__(
        self, spec: DriverSpec, start: np.ndarray, *, lag: float = 0.02, rest: Optional[np.ndarray] = None
    ) -> None:
        self._spec, self._lag = spec, lag
        self.q = np.array(start, np.float64)
        self.target = self.q.copy()
        self.settings: Dict[str, Any] = {"compliance": 0.0, "load": 0.0}
        self._rest = self.q.copy() if rest is None else np.array(rest, np.float64)
        self._on = np.ones(len(self.q), bool)  # torque, of each joint
        self._clock: Callable[[], float] = lambda: 0.0
        self._moment = 0.0

    def spec(self) -> DriverSpec:
        return self._spec

    def connect(self, clock: Callable[[], float]) -> None:
        self._clock, self._moment = clock, clock()

    def read(self) -> Reading:
        self.advance()
        goal = np.where(self._on, self.target, self._rest)
        dq = (goal - self.q) / np.where(self._on, self._lag, SINKS)
        effort = np.where(self._on, STIFFNESS * (self.target - self.q), 0.0)
        return Reading(self.q.copy(), dq, effort, self._moment, torque=bool(self._on.all()))

    def command(self, target: np.ndarray, dt: float) -> None:
        target = sendable(target, len(self.q))
        self.advance()
        self.target = target

    def set(self, name: str, value: Any) -> None:
        self.advance()
        if name == "torque":
            self._on[:] = bool(value)
            self.target = self.q.copy()
        elif name in self.settings:
            self.settings[name] = value
        else:
            raise DriverError("{}: unknown. Valid: torque, {}.".format(name, ", ".join(sorted(self.settings))))

    def clear_faults(self) -> None:
        """Switch torque on; an arm that had none stays where it is."""
        self.advance()
        self.target = np.where(self._on, self.target, self.q)
        self._on[:] = True

    def stop(self, reason: str, level: int = 0) -> bool:
        self.advance()
        if level:
            self.target = self.q.copy()
        return True

    def advance(self) -> None:
        """Simulate up to the clock's moment; a clock that ran backwards moves nothing."""
        now = self._clock()
        elapsed, self._moment = max(now - self._moment, 0.0), now
        goal = np.where(self._on, self.target, self._rest)
        lag = np.where(self._on, self._lag, SINKS)
        self.q = goal + (self.q - goal) * np.exp(-elapsed / lag)


def viperx_arms(
    *, arms: int = 2, lag: float = 0.02, rate: float = 200.0, tick: float = 0.02, simulated: bool = False
) -> FakeArms:
    """Simulate arms like ALOHA's, each with six joints and a gripper.

    Args:
        arms: how many.
        lag: see FakeArms.
        rate: passes of the loop per second.
        tick: seconds of a control tick.
        simulated: as of a task without a cell, see DriverSpec; False: like real arms, with a beep and an operator's go.
    """
    joints = len(HOME)
    effort = (*(PRESSES + STIFFNESS * lag * v for v in VELOCITY[:-1]), float("inf"))
    spec = DriverSpec(
        "fake arms", LOW * arms, HIGH * arms, VELOCITY * arms, *equal_arms(arms, joints),
        (("q", joints * arms),), rate, tick, effort=effort * arms, simulated=simulated is True,
    )  # fmt: skip
    return FakeArms(spec, np.array(HOME * arms), lag=lag, rest=np.array(HOME * arms) + np.array(SAG * arms))

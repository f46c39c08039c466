"""The fake ALOHA task as a driver of the robot server: one simulation step for each set point."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from serl_chunk.config.robots import FakeAlohaConfig
from serl_chunk.robots.fake import spec as task
from serl_chunk.robots.fake.env import FakeAlohaEnv
from serl_chunk_robot.drivers.base import Driver, DriverError, DriverSpec, Event, Reading, sendable

STIFFNESS = 20.0  # effort per rad between the target and the joint
# The task itself moves a joint by no more than its rate a tick. The limits are above that: the expert's noise reaches
# beyond the rate, and a way that begins and ends at rest needs 1.9 times the speed of one that does not.
FASTER = 2.0


class FakeAlohaDriver(Driver):
    """Two arms and a cube that exist in this process.

    A set point is one step of the task: the joints go as far towards it as the task's rates let them. A set point that
    is repeated changes nothing once the joints are there. In addition to the state, `extra` has the "cube" (float64[3],
    m) and its "holder" (float64[1]: 0 left, 1 right, -1 none), so that a scripted human sees them. `control_hz`,
    `observe_objects`, `grasp_tolerance`: as in FakeAlohaConfig.
    """

    def __init__(
        self,
        *,
        control_hz: float = FakeAlohaConfig.control_hz,
        observe_objects: bool = FakeAlohaConfig.observe_objects,
        grasp_tolerance: float = FakeAlohaConfig.grasp_tolerance,
    ) -> None:
        self.env = FakeAlohaEnv(
            FakeAlohaConfig(control_hz=control_hz, observe_objects=observe_objects, grasp_tolerance=grasp_tolerance)
        )
        self._clock: Callable[[], float] = lambda: 0.0
        self._target = np.array(self.env.joints)
        self._before = self._target.copy()  # joints at the last read
        self._events: list[Event] = []
        self._torque = True

    def spec(self) -> DriverSpec:
        spec = self.env.robot_spec
        dt, state = spec.dt, [("q", task.ACTION_DIM)]
        if spec.state_dim > task.ACTION_DIM:
            state.append(("objects", spec.state_dim - task.ACTION_DIM))
        # Fingers that squeeze the cube are far from their target, and leave it at the first command to open.
        grippers = np.isin(np.arange(task.ACTION_DIM), task.GRIPPER)
        velocity = np.where(grippers, 1.0, FASTER * task.JOINT_RATE) / dt
        acceleration = 4 * velocity / dt  # of two passes that turn a joint round: it never limits
        return DriverSpec(
            spec.name, spec.action_low, spec.action_high, tuple(velocity), task.GRIPPER, spec.arms, tuple(state),
            rate=spec.control_hz, tick=dt, acceleration=tuple(acceleration), jerk=tuple(4 * acceleration / dt),
            home=task.HOME_JOINTS, simulated=True,
        )  # fmt: skip

    def connect(self, clock: Callable[[], float]) -> None:
        self._clock = clock

    def read(self) -> Reading:
        q = np.array(self.env.joints)
        dq, self._before = (q - self._before) * self.env.robot_spec.control_hz, q
        effort = np.where(self._torque, STIFFNESS * (self._target - q), 0.0)
        events, self._events = tuple(self._events), []
        extra = {"cube": np.array(self.env.cube), "holder": np.array([self.env.holder], np.float64)}
        if self.env.config.observe_objects:
            extra["objects"] = np.array(self.env.objects())
        return Reading(q.copy(), dq, effort, self._clock(), extra=extra, events=events, torque=self._torque)

    def command(self, target: np.ndarray, dt: float) -> None:
        self._target = sendable(target, task.ACTION_DIM)
        reward, info = self.env._move(self._target)
        if reward or info["success"]:
            self._events.append(Event(float(reward), bool(info["success"])))

    def set(self, name: str, value: Any) -> None:
        if name != "torque":
            raise DriverError(f"{name}: unknown. Valid: torque.")
        self._torque = bool(value)

    def clear_faults(self) -> None:
        self._torque = True

    def stop(self, reason: str, level: int = 0) -> bool:
        return True

    def reset_scene(self, seed: int) -> None:
        """Put the cube where the environment's reset with this seed does; no arm moves."""
        self.env.reset_cube(seed)

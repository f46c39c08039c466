"""Frankas behind a robot server (driver "franka_http") with HIL-SERL's actions and states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from serl_chunk.config.robots import FrankaConfig
from serl_chunk.robots import franka_space
from serl_chunk.robots.base import RobotEnv, StepResult
from serl_chunk.robots.served.robot import ServedRobot
from serl_chunk.types import IMAGE_PREFIX, CameraSpec, ConfigError, Observation, RobotSpec

CONTROL_HZ = 10.0  # HIL-SERL's
ARM, SERVED_STATE = 7, 20  # numbers of an arm: a place and its gripper; and what the server's state has of it
TELLS = 0.5  # action of a gripper: so much closes or opens it, and less leaves it as it is
_SIZES = {"gripper_pose": 1, "tcp_force": 3, "tcp_pose": 6, "tcp_torque": 3, "tcp_vel": 6}


def franka_spec(config: FrankaConfig) -> RobotSpec:
    """Return the specification: actions in [-1, 1], six of each arm and, with `grippers`, one of its gripper."""
    each = 6 + config.grippers
    size = each * config.arms
    return RobotSpec(
        name=config.kind,
        control_hz=CONTROL_HZ,
        state_dim=config.arms * sum(_SIZES[name] for name in config.proprio),
        action_low=(-1.0,) * size,
        action_high=(1.0,) * size,
        joint_of_action=(-1,) * size,  # twists: a hold of 0 is a standstill
        grippers=tuple(range(6, size, 7)) if config.grippers else (),
        cameras=tuple(CameraSpec(name, config.image_size, config.image_size) for name in config.cameras),
        max_episode_steps=config.max_episode_steps,
        arms=tuple((k, k + each) for k in range(0, size, each)),
    )


class FrankaRobot(RobotEnv):
    """The robot at `config.server`, moved and observed as HIL-SERL's wrappers do.

    An action's target is the *measured* place and a step, so that a robot that presses on something presses no harder
    from tick to tick. Its state is relative to the place after `reset`. `info["executed_action"]` is the action of the
    set point that was reached where the robot does not follow; a gripper's is the one that was sent.

    Raises:
        ConfigError: no server is named, or its robot differs from `config`.
    """

    answers_late = True
    starts_repeat = False
    observes_again = True

    def __init__(self, config: FrankaConfig, *, images: str = "on_request", name: str = "serl_chunk") -> None:
        if not config.server:
            raise ConfigError(
                "empty: a Franka is moved by a robot server alone. Serve the driver franka_http and name its "
                "HOST[:PORT] (docs/robot_server.md)", parameter="robot.server",
            )  # fmt: skip
        self._config, self._scale, self._boxes = config, np.array(config.scale), _boxes(config)
        self._set_spaces(franka_spec(config), images)
        self._served = ServedRobot(config, _served_spec(config, self.robot_spec), name=name)
        if images == "always":
            self._served.watch(config.cameras)
        self._origins: list[np.ndarray] = []
        self._from: list[np.ndarray] = []  # measured places of the arms, float64[6] each, that the last targets are of
        self._grips = np.full(config.arms, 0.5)  # commands of the grippers: 0 close, 1 open, 0.5 neither
        self._given = np.zeros(len(self._low), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Observation, dict[str, Any]]:
        """Let the server reset the robot; see ServedRobot. States are relative to where it stands then."""
        super().reset(seed=seed)
        self._served.stop, self._served.paced, self._served.may_move = self.stop, self.paced, self.may_move
        _, info = self._served.reset(seed=seed, options=options)
        self.conditions = self._served.conditions
        return self._from_here(), info

    def observe_again(self) -> Observation:
        """Return an observation of now, of a robot that stands since its reset."""
        self._served.observe_again()
        return self._from_here()

    def rest(self) -> None:
        self._served.rest()

    def idle(self) -> None:
        self._served.idle()

    def hindrances(self) -> Sequence[tuple[str, str]]:
        return self._served.hindrances()

    def camera_ages(self) -> Mapping[str, float]:
        return self._served.camera_ages()

    def _from_here(self) -> Observation:
        self._origins = self._places()
        self._grips = self._served.seen().q[6::ARM].copy()
        return self._observe()

    def send(self, command: np.ndarray) -> None:
        """Send the target of an action, `float32[A]`."""
        self._given = self._checked(command)  # the twist in the base's frame is what is clipped
        self._from, targets = self._places(), []
        for k, (first, end) in enumerate(self.robot_spec.arms):
            action = self._given[first:end].astype(np.float64)
            if self._config.grippers and abs(action[6]) >= TELLS:
                self._grips[k] = float(action[6] > 0)
            targets += [
                franka_space.target(self._from[k], action[:6], self._scale, self._boxes[k]),
                self._grips[k : k + 1],
            ]
        self._served.send(np.concatenate(targets))

    def receive(self) -> StepResult:
        """Return the server's newest state as the result of the last tick."""
        self._served.paced = self.paced
        _, reward, terminated, truncated, info = self._served.receive()
        if "executed_action" in info:
            executed = self._given.copy()
            for k, (first, _) in enumerate(self.robot_spec.arms):
                reached = info["executed_action"][ARM * k : ARM * k + 6].astype(np.float64)
                executed[first : first + 6] = franka_space.action_of(self._from[k], reached, self._scale)
            info["executed_action"] = np.clip(executed, self._low, self._high)
        return self._observe(), reward, terminated, truncated, info

    def step(self, action: np.ndarray) -> StepResult:
        """Send an action, wait for the end of the tick and return its result."""
        self.send(action)
        return self.receive()

    def action_of_twist(self, arm: int, twist: np.ndarray) -> np.ndarray:
        """Return an arm's action, float64[6], for a twist along and about the axes of its base, float64[6]."""
        return franka_space.in_tip_frame(self._places()[arm], twist)

    def close(self) -> None:
        """Release the robot and give the lease back. It is HELD then, with torque on."""
        self._served.close()

    def watch(self, cameras: Sequence[str]) -> None:
        self._served.watch(cameras)

    def frame_numbers(self) -> Mapping[str, int]:
        return self._served.frame_numbers()

    def _frame(self, camera: str) -> np.ndarray:
        return self._served.read_images([camera])[IMAGE_PREFIX + camera]

    def _places(self) -> list[np.ndarray]:
        q = self._served.seen().q
        return [q[k : k + 6] for k in range(0, len(q), ARM)]

    def _observe(self) -> Observation:
        extra, parts = self._served.seen().extra, []
        for k, (place, origin) in enumerate(zip(self._places(), self._origins, strict=True)):
            values = {
                "gripper_pose": extra["gripper"][k : k + 1],
                "tcp_force": extra["force"][3 * k : 3 * k + 3],
                "tcp_pose": franka_space.relative(place, origin),
                "tcp_torque": extra["torque"][3 * k : 3 * k + 3],
                "tcp_vel": franka_space.in_tip_frame(place, extra["vel"][6 * k : 6 * k + 6]),
            }
            parts += [values[name] for name in sorted(self._config.proprio)]  # HIL-SERL's order
        return self._observed(np.concatenate(parts).astype(np.float32))


def _boxes(config: FrankaConfig) -> list[franka_space.Box]:
    lows, highs = (np.array(x).reshape(config.arms, 6) for x in (config.box_low, config.box_high))
    mirrored = (0, 2) if config.mirrored_yaw else (0,)
    return [franka_space.Box(low, high, mirrored) for low, high in zip(lows, highs, strict=True)]


def _served_spec(config: FrankaConfig, spec: RobotSpec) -> RobotSpec:
    """What the server is compared with: targets are places within the boxes."""
    low: list[float] = []
    high: list[float] = []
    for least, most in (box.interval() for box in _boxes(config)):
        low += [*least.tolist(), 0.0]
        high += [*most.tolist(), 1.0]
    size = ARM * config.arms
    return RobotSpec(
        spec.name, spec.control_hz, SERVED_STATE * config.arms, tuple(low), tuple(high), (-1,) * size,
        tuple(range(6, size, ARM)), spec.cameras, spec.max_episode_steps,
    )  # fmt: skip

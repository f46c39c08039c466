"""Frankas behind a robot server (driver "franka_http") with HIL-SERL's actions and states."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from serl_chunk.config.robots import FrankaConfig
from serl_chunk.robots.base import StepResult, moves_spec
from serl_chunk.robots.served.robot import ServedRobot
from serl_chunk.types import Observation, RobotSpec
from serl_chunk_robot.geometry.rotations import euler_of_matrix, matrix_of_euler, unwrapped

CONTROL_HZ = 10.0  # HIL-SERL's
ARM, SERVED_STATE = 7, 20  # numbers of an arm: a place and its gripper; and what the server's state has of it
TELLS = 0.5  # action of a gripper: so much closes or opens it, and less leaves it as it is
_SIZES = {"gripper_pose": 1, "tcp_force": 3, "tcp_pose": 6, "tcp_torque": 3, "tcp_vel": 6}


def franka_spec(config: FrankaConfig) -> RobotSpec:
    """Return the specification: actions in [-1, 1], six of each arm and, with `grippers`, one of its gripper."""
    each, state_dim = 6 + config.grippers, config.arms * sum(_SIZES[name] for name in config.proprio)
    size = each * config.arms
    grippers, arms = range(6, size, 7) if config.grippers else (), tuple((k, k + each) for k in range(0, size, each))
    frames = config.cameras, config.image_size, config.max_episode_steps
    return moves_spec(config.kind, CONTROL_HZ, state_dim, size, tuple(grippers), *frames, arms)


class FrankaRobot(ServedRobot):
    """The robot at `config.server`, moved and observed as HIL-SERL's wrappers do.

    An action's target is the *measured* place and a step, so that a robot that presses on something presses no harder
    from tick to tick. Its state is relative to the place after `reset`. `info["executed_action"]` is the action of the
    set point that was reached where the robot does not follow; a gripper's is the one that was sent. Raises
    ConfigError: the server's robot differs from `config`.
    """

    _config: FrankaConfig

    def __init__(self, config: FrankaConfig, *, images: str = "on_request", name: str = "serl_chunk") -> None:
        spec = franka_spec(config)
        super().__init__(config, spec, served=_served_spec(config, spec), name=name, images=images)
        self._scale, self._boxes = np.array(config.scale), _boxes(config)
        self._origins: list[np.ndarray] = []
        self._from: list[np.ndarray] = []  # measured places of the arms, float64[6] each, that the last targets are of
        self._grips = np.full(config.arms, 0.5)  # commands of the grippers: 0 close, 1 open, 0.5 neither
        self._given = np.zeros(len(self._low), np.float32)

    def _first(self) -> Observation:
        self._origins = self._places()
        self._grips = self.seen().q[6::ARM].copy()
        return self._observe()

    def send(self, command: np.ndarray) -> None:
        """Send the target of an action, `float32[A]`."""
        self._given = self._checked(command)  # the twist in the base's frame is what is clipped
        self._from, targets = self._places(), []
        for k, (first, end) in enumerate(self.robot_spec.arms):
            action = self._given[first:end].astype(np.float64)
            if self._config.grippers and abs(action[6]) >= TELLS:
                self._grips[k] = float(action[6] > 0)
            targets += [target(self._from[k], action[:6], self._scale, self._boxes[k]), self._grips[k : k + 1]]
        self._send_target(np.concatenate(targets))

    def receive(self) -> StepResult:
        observation, reward, terminated, truncated, info = super().receive()
        if "executed_action" in info:
            executed = self._given.copy()
            for k, (first, _) in enumerate(self.robot_spec.arms):
                reached = info["executed_action"][ARM * k : ARM * k + 6].astype(np.float64)
                executed[first : first + 6] = action_of(self._from[k], reached, self._scale)
            info["executed_action"] = np.clip(executed, self._low, self._high)
        return observation, reward, terminated, truncated, info

    def action_of_twist(self, arm: int, twist: np.ndarray) -> np.ndarray:
        """Return an arm's action, float64[6], for a twist along and about the axes of its base, float64[6]."""
        return in_tip_frame(self._places()[arm], twist)

    def _places(self) -> list[np.ndarray]:
        q = self.seen().q
        return [q[k : k + 6] for k in range(0, len(q), ARM)]

    def _observe(self) -> Observation:
        extra, parts = self.seen().extra, []
        for k, (place, origin) in enumerate(zip(self._places(), self._origins, strict=True)):
            values = {
                "gripper_pose": extra["gripper"][k : k + 1],
                "tcp_force": extra["force"][3 * k : 3 * k + 3],
                "tcp_pose": relative(place, origin),
                "tcp_torque": extra["torque"][3 * k : 3 * k + 3],
                "tcp_vel": in_tip_frame(place, extra["vel"][6 * k : 6 * k + 6]),
            }
            parts += [values[name] for name in sorted(self._config.proprio)]  # HIL-SERL's order
        return self._observed(np.concatenate(parts).astype(np.float32))


def _boxes(config: FrankaConfig) -> list[Box]:
    lows, highs = (np.array(x).reshape(config.arms, 6) for x in (config.box_low, config.box_high))
    mirrored = (0, 2) if config.mirrored_yaw else (0,)
    return [Box(low, high, mirrored) for low, high in zip(lows, highs, strict=True)]


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


class Box(NamedTuple):
    """Where a target may be, float64[6] each.

    Of angles in `mirrored` the magnitude is clipped and the sign kept, so that a box around pi has no gap there.
    """

    low: np.ndarray
    high: np.ndarray
    mirrored: tuple[int, ...] = (0,)

    def clip(self, place: np.ndarray) -> np.ndarray:
        """The place in the box that belongs to `place`, whose angles are within +-pi."""
        out = np.clip(place, self.low, self.high)
        for angle in (3 + m for m in self.mirrored):
            size = np.clip(abs(place[angle]), self.low[angle], self.high[angle])
            out[angle] = np.sign(place[angle]) * size
        return out

    def interval(self) -> tuple[np.ndarray, np.ndarray]:
        """The least and the largest numbers of places in the box, with angles that are unwrapped around its middle."""
        low, high = self.low.copy(), self.high.copy()
        for angle in (3 + m for m in self.mirrored):
            around_pi = self.high[angle] >= np.pi
            low[angle] = self.low[angle] if around_pi else -self.high[angle]
            high[angle] = 2 * np.pi - self.low[angle] if around_pi else self.high[angle]
        return low, high


def target(place: np.ndarray, action: np.ndarray, scale: np.ndarray, box: Box) -> np.ndarray:
    """The place, [6], that an action leads to from a measured place, with its angles near the measured ones.

    `scale`: m and rad of an action of 1, [2].
    """
    turn = matrix_of_euler(place[3:])
    twist = np.clip(_adjoint(place, turn) @ action, -1.0, 1.0)
    after = matrix_of_euler(scale[1] * twist[3:]) @ turn
    clipped = box.clip(np.concatenate([place[:3] + scale[0] * twist[:3], euler_of_matrix(after)]))
    return np.concatenate([clipped[:3], unwrapped(clipped[3:], place[3:])])


def action_of(place: np.ndarray, reached: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The action, [6], that leads from a measured place to `reached`; beyond +-1 where that is further away."""
    turn = matrix_of_euler(reached[3:]) @ matrix_of_euler(place[3:]).T
    return in_tip_frame(place, np.concatenate([(reached[:3] - place[:3]) / scale[0], euler_of_matrix(turn) / scale[1]]))


def in_tip_frame(place: np.ndarray, twist: np.ndarray) -> np.ndarray:
    """A twist in the base's frame, [6], such as a speed or a SpaceMouse's command, as one in that of the tip."""
    return np.linalg.solve(_adjoint(place, matrix_of_euler(place[3:])), twist)


def relative(place: np.ndarray, origin: np.ndarray) -> np.ndarray:
    """A place, [6], in the frame of another one, with angles within +-pi."""
    turn = matrix_of_euler(origin[3:]).T
    return np.concatenate([turn @ (place[:3] - origin[:3]), euler_of_matrix(turn @ matrix_of_euler(place[3:]))])


def _adjoint(place: np.ndarray, turn: np.ndarray) -> np.ndarray:
    """What makes a twist in the base's frame of one in the tip's, [6, 6]."""
    x, y, z = place[:3]
    out = np.zeros((6, 6))
    out[:3, :3] = out[3:, 3:] = turn
    out[3:, :3] = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]]) @ turn
    return out

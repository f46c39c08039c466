"""The fake single arm: a hand over a table, commanded by velocities, a block to pick up and place, and its cameras."""

from __future__ import annotations

from typing import Any

import numpy as np

from serl_chunk.config.robots import FakeSingleArmConfig
from serl_chunk.robots.base import Expert, InterventionSource, SimulatedEnv
from serl_chunk.robots.fake import single_arm_spec as task
from serl_chunk.robots.fake.kinematics import Point
from serl_chunk.robots.fake.render import Camera, Colour, Rod, background, draw

_BLOCK: Colour = (210, 40, 40)
_HAND: Colour = (120, 120, 170)
_FINGER: Colour = (15, 15, 15)
_PALM = 0.06  # m from the palm to the fingertips
_FINGER_TRAVEL = 0.035  # m of each finger from the middle, fully open


def render(name: str, env: FakeSingleArmEnv) -> np.ndarray:
    """What camera `name` (`side` or `wrist`) of the environment sees now: `uint8[size, size, 3]`, RGB."""
    forward, finger = env.rotation[:, 2], env.rotation[:, 1]
    if name == "wrist":
        eye = env.position - 0.16 * forward + 0.07 * env.rotation[:, 0]
        camera = _looking(eye, env.position - eye, env.rotation[:, 1], 1.2)
    else:
        eye = np.array([1.15, 0.0, 0.5])
        camera = _looking(eye, np.array([0.5, 0.0, 0.05]) - eye, np.array([0.0, 1.0, 0.0]), 1.9)
    palm = env.position - _PALM * forward
    rods = [Rod(_point(palm - 0.12 * forward), _point(palm), 0.03, _HAND)]
    for side in (-1.0, 1.0):
        spread = side * (0.006 + _FINGER_TRAVEL * env.opening) * finger
        rods.append(Rod(_point(palm + spread), _point(env.position + spread), 0.007, _FINGER))
    half = (task.BLOCK_LENGTH - task.BLOCK_WIDTH) / 2 * np.array([np.cos(env.yaw), np.sin(env.yaw), 0.0])
    rods.append(Rod(_point(env.block - half), _point(env.block + half), task.BLOCK_WIDTH / 2, _BLOCK))
    return draw(background(camera, env.config.image_size, task.PLACE), camera, rods)


def _looking(eye: np.ndarray, ahead: np.ndarray, right: np.ndarray, focal: float) -> Camera:
    """A camera at `eye` whose image's x axis is nearest to `right`."""
    ahead = ahead / np.linalg.norm(ahead)
    right = right - (right @ ahead) * ahead
    right = right / np.linalg.norm(right)
    return Camera(_point(eye), _point(right), _point(np.cross(ahead, right)), _point(ahead), focal)


def _point(v: np.ndarray) -> Point:
    return float(v[0]), float(v[1]), float(v[2])


DOWN = np.array([[1.0, 0.0, 0.0], [0.0, -1.0, 0.0], [0.0, 0.0, -1.0]])  # columns: x, finger and forward axis


class FakeSingleArmEnv(SimulatedEnv):
    """Pick the block up and release it at a fixed place, with end-effector velocities as HIL-SERL's robots take them.

    Actions are `float32[7]` in [-1, 1]: the grip point's velocity in the world (times 0.3 m/s), the hand's angular
    velocity in the world (times 1.5 rad/s) and the fingers' (times 4 openings/s, positive opens); zeros hold still.
    The hand stays in its workspace and within 0.6 rad of straight down. The state is `float32[15]`: opening, 5 times
    the grip point's position (m), the hand's forward and finger axes (unit vectors), then with `observe_objects` 5
    times the block's centre relative to the grip point and the cosine and sine of twice its yaw (its two ends look
    alike). It contains neither time nor progress nor place.

    Fingers grasp only by closing: their opening must cross 0.4 downwards while the grip point is within
    `grasp_tolerance` of the block's centre and the finger axis within `grasp_angle` of the block's short side. The
    block stops the fingers at 0.3 and moves with the hand. Opened fingers let it fall to the table below. Reward is 1
    and the episode terminates when it is released within `place_tolerance` of the place (in three dimensions); else 0.
    """

    def __init__(self, config: FakeSingleArmConfig, *, images: str = "on_request") -> None:
        self.config = config
        self._set_spaces(task.fake_single_arm_spec(config), images)
        self.position, self.rotation, self.opening = np.array(task.HOME), DOWN.copy(), 1.0
        self.block, self.yaw = np.array((*task.BLOCK_START_LOW, task.BLOCK_REST_Z)), 0.0
        self.held = False
        self.offset = np.zeros(3)  # of the held block's centre in the hand's axes, m
        self._offset_yaw = 0.0  # block's yaw - hand's yaw while held, rad

    @property
    def hand_yaw(self) -> float:
        """Direction of the hand's x axis in the plane of the table, rad; the fingers close across it."""
        return float(np.arctan2(self.rotation[1, 0], self.rotation[0, 0]))

    @property
    def misalignment(self) -> float:
        """The block's yaw minus the hand's, in [-pi/2, pi/2): the block's two ends look alike."""
        return float((self.yaw - self.hand_yaw + np.pi / 2) % np.pi - np.pi / 2)

    def make_expert(self) -> Expert:
        from serl_chunk.robots.fake.single_arm_expert import SingleArmExpert

        return SingleArmExpert(self)

    def make_scripted_human(self) -> InterventionSource:
        from serl_chunk.robots.fake.single_arm_expert import SingleArmHuman

        return SingleArmHuman(self)

    def _start(self, seed: int | None) -> dict[str, Any]:
        draw = self.np_random.uniform
        self.block = np.append(draw(task.BLOCK_START_LOW, task.BLOCK_START_HIGH), task.BLOCK_REST_Z)
        self.yaw = float(draw(-task.BLOCK_START_YAW, task.BLOCK_START_YAW))
        self.position = task.HOME + draw(-task.START_NOISE, task.START_NOISE, 3)
        self.rotation = _turn(draw(-task.START_TURN_NOISE, task.START_TURN_NOISE, 3)) @ DOWN
        self.opening, self.held = 1.0, False
        return {}

    def _move(self, action: np.ndarray) -> tuple[float, dict[str, Any]]:
        executed = np.clip(action, -1.0, 1.0)
        velocity, dt = executed.astype(np.float64), self.robot_spec.dt
        moved = self.position + velocity[:3] * (task.LINEAR_SPEED * dt)
        self.position = np.clip(moved, task.WORKSPACE_LOW, task.WORKSPACE_HIGH)
        turned = _turn(velocity[3:6] * (task.ANGULAR_SPEED * dt)) @ self.rotation
        if -turned[2, 2] >= np.cos(task.MAX_TILT):
            self.rotation = turned
        before = self.opening
        self.opening = float(np.clip(before + velocity[6] * task.GRIPPER_SPEED * dt, 0.0, 1.0))

        if self.held:
            self.block = self.position + self.rotation @ self.offset
            self.block[2] = max(self.block[2], task.BLOCK_REST_Z)
            self.yaw = self.hand_yaw + self._offset_yaw
        self._close_fingers(before)
        success = self._release()
        return success, {"success": success, "executed_action": executed}

    def _frame(self, camera: str) -> np.ndarray:
        return render(camera, self)

    def _close_fingers(self, before: float) -> None:
        """Let the block stop the fingers, and hold it if they closed on it on this tick."""
        near = np.linalg.norm(self.block - self.position) <= self.config.grasp_tolerance
        around = near and abs(self.misalignment) <= self.config.grasp_angle
        if before > task.FINGERS_CLOSED >= self.opening and around:
            self.held = True
            self.offset, self._offset_yaw = self.rotation.T @ (self.block - self.position), self.yaw - self.hand_yaw
        # Fingers that are already further closed (an empty fist next to the block) have nothing between them.
        if self.held or (around and before >= task.FINGERS_ON_BLOCK):
            self.opening = max(self.opening, task.FINGERS_ON_BLOCK)

    def _release(self) -> bool:
        """Drop the block if the fingers that hold it are open; return whether that was at its place."""
        if not self.held or self.opening <= task.FINGERS_CLOSED:
            return False
        success = bool(np.linalg.norm(self.block - task.PLACE) <= self.config.place_tolerance)
        self.block[2], self.held = task.BLOCK_REST_Z, False
        return success

    def _state(self) -> np.ndarray:
        k, forward, finger = task.POSITION_SCALE, self.rotation[:, 2], self.rotation[:, 1]
        parts = [np.array([self.opening]), k * self.position, forward, finger]
        if self.config.observe_objects:
            parts += [k * (self.block - self.position), np.array([np.cos(2 * self.yaw), np.sin(2 * self.yaw)])]
        return np.concatenate(parts).astype(np.float32)


def _turn(vector: np.ndarray) -> np.ndarray:
    """The rotation by the vector's length (rad) about its direction, `float64[3, 3]` (Rodrigues' formula)."""
    angle = float(np.linalg.norm(vector))
    if angle < 1e-12:
        return np.eye(3)
    x, y, z = vector / angle
    cross = np.array([[0.0, -z, y], [z, 0.0, -x], [-y, x, 0.0]])
    return np.eye(3) + np.sin(angle) * cross + (1.0 - np.cos(angle)) * (cross @ cross)

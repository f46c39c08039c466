"""The fake single arm: a hand over a table, commanded by velocities, a block to pick up and place, and its cameras."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import gymnasium
import numpy as np

from serl_chunk.config.robots import FakeSingleArmConfig
from serl_chunk.robots.base import Expert, InterventionSource, RobotEnv
from serl_chunk.robots.fake import single_arm_spec as task
from serl_chunk.robots.fake.kinematics import Point
from serl_chunk.robots.fake.render import Camera, Colour, Rod, background, draw
from serl_chunk.robots.fake.rng_state import generator_at, given_start
from serl_chunk.types import IMAGE_PREFIX, STATE, DataError, Observation

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


class SingleArmState(NamedTuple):
    """Everything that decides how an episode goes on."""

    position: np.ndarray  # float64[3], grip point, m
    rotation: np.ndarray  # float64[3, 3], columns: the hand's x, the fingers' and the forward axis in the world
    opening: float  # 0 closed .. 1 open
    block: np.ndarray  # float64[3], centre, m
    yaw: float  # of the block's long side, rad
    held: bool
    offset: np.ndarray  # float64[3], the held block's centre in the hand's axes, m
    offset_yaw: float  # block's yaw - hand's yaw while held, rad
    tick: int
    active: bool  # whether `step` may be called: False before the first reset
    rng: dict[str, Any]  # state of the generator that draws start states


class FakeSingleArmEnv(RobotEnv):
    """Pick the block up and release it at a fixed place, with end-effector velocities as HIL-SERL's robots take them.

    Actions are `float32[7]` in [-1, 1]: the grip point's velocity in the world (times 0.3 m/s), the hand's angular
    velocity in the world (times 1.5 rad/s) and the fingers' (times 4 openings/s, positive opens); zeros hold still.
    The hand stays in its workspace and within 0.6 rad of straight down. The state is `float32[15]`: opening, 5 times
    the grip point's position (m), the hand's forward and finger axes (unit vectors), then with `observe_objects` 5
    times the block's centre relative to the grip point and the cosine and sine of twice its yaw (its two ends look
    alike). It tells neither time nor progress nor place.

    Fingers grasp only by closing: their opening must cross 0.4 downwards while the grip point is within
    `grasp_tolerance` of the block's centre and the finger axis within `grasp_angle` of the block's short side. The
    block stops the fingers at 0.3 and moves with the hand. Opened fingers let it fall to the table below. Reward is 1
    and the episode terminates when it is released within `place_tolerance` of the place (in three dimensions); else 0.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - gymnasium declares it so

    def __init__(self, config: FakeSingleArmConfig, *, images: str = "on_request") -> None:
        self.config = config
        self._set_spaces(task.fake_single_arm_spec(config), images)
        self.position, self.rotation, self.opening = np.array(task.HOME), DOWN.copy(), 1.0
        self.block, self.yaw = np.array((*task.BLOCK_START_LOW, task.BLOCK_REST_Z)), 0.0
        self.held, self.tick, self._active = False, 0, False
        self._offset, self._offset_yaw = np.zeros(3), 0.0

    @property
    def hand_yaw(self) -> float:
        """Direction of the hand's x axis in the plane of the table, rad; the fingers close across it."""
        return float(np.arctan2(self.rotation[1, 0], self.rotation[0, 0]))

    @property
    def misalignment(self) -> float:
        """The block's yaw minus the hand's, in [-pi/2, pi/2): the block's two ends look alike."""
        return float((self.yaw - self.hand_yaw + np.pi / 2) % np.pi - np.pi / 2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Draw a start state; `options={"start": state}` begins at a saved SingleArmState instead, at tick 0.

        A given start leaves the generator of later start states alone. Raises DataError for another kind of start.
        """
        super().reset(seed=seed)
        start = given_start(options, SingleArmState)
        if start is not None:
            self._place(start)
        else:
            draw = self.np_random.uniform
            self.block = np.append(draw(task.BLOCK_START_LOW, task.BLOCK_START_HIGH), task.BLOCK_REST_Z)
            self.yaw = float(draw(-task.BLOCK_START_YAW, task.BLOCK_START_YAW))
            self.position = task.HOME + draw(-task.START_NOISE, task.START_NOISE, 3)
            self.rotation = _turn(draw(-task.START_TURN_NOISE, task.START_TURN_NOISE, 3)) @ DOWN
            self.opening, self.held = 1.0, False
        self.tick, self._active = 0, True
        return self._observation(), {"success": False}

    def step(self, action: np.ndarray) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Move for one tick. Raises DataError on an action that is not 7 finite numbers."""
        if not self._active:
            raise gymnasium.error.ResetNeeded("call reset() before the first step()")
        action = np.asarray(action, np.float32)
        if action.shape != (task.ACTION_DIM,) or not np.isfinite(action).all():
            raise DataError(f"an action must be {task.ACTION_DIM} finite numbers, got {action}")
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
            self.block = self.position + self.rotation @ self._offset
            self.block[2] = max(self.block[2], task.BLOCK_REST_Z)
            self.yaw = self.hand_yaw + self._offset_yaw
        self._close_fingers(before)
        success = self._release()
        self.tick += 1
        truncated = not success and self.tick >= self.config.max_episode_steps
        return (
            self._observation(),
            float(success),
            success,
            truncated,
            {"success": success, "executed_action": executed},
        )

    def read_images(self, cameras: Sequence[str] | None = None) -> Observation:
        """Frames `{"images/<camera>": uint8[size, size, 3]}` of the present moment; all cameras by default."""

        names = task.CAMERAS if cameras is None else cameras
        return {IMAGE_PREFIX + name: render(self.robot_spec.camera(name).name, self) for name in names}

    def save_state(self) -> SingleArmState:
        """Everything `restore_state` needs, the generator of later start states included."""
        return SingleArmState(
            self.position.copy(), self.rotation.copy(), self.opening, self.block.copy(), self.yaw, self.held,
            self._offset.copy(), self._offset_yaw, self.tick, self._active, dict(self.np_random.bit_generator.state),
        )  # fmt: skip

    def restore_state(self, state: SingleArmState) -> Observation:
        """Continue from `state` bit for bit, in this or another environment of the same configuration."""
        self._place(state)
        self.tick, self._active = state.tick, state.active
        self.np_random = generator_at(state.rng)
        return self._observation()

    def make_expert(self) -> Expert:
        """The scripted demonstrator of this environment."""
        from serl_chunk.robots.fake.single_arm_expert import SingleArmExpert

        return SingleArmExpert(self)

    def make_scripted_human(self) -> InterventionSource:
        """The scripted human who intervenes when the policy gets nowhere."""
        from serl_chunk.robots.fake.single_arm_expert import SingleArmHuman

        return SingleArmHuman(self)

    def _place(self, state: SingleArmState) -> None:
        self.position, self.rotation, self.opening = state.position.copy(), state.rotation.copy(), state.opening
        self.block, self.yaw, self.held = state.block.copy(), state.yaw, state.held
        self._offset, self._offset_yaw = state.offset.copy(), state.offset_yaw

    def _close_fingers(self, before: float) -> None:
        """Let the block stop the fingers, and hold it if they closed on it on this tick."""
        near = np.linalg.norm(self.block - self.position) <= self.config.grasp_tolerance
        around = near and abs(self.misalignment) <= self.config.grasp_angle
        if before > task.FINGERS_CLOSED >= self.opening and around:
            self.held = True
            self._offset, self._offset_yaw = self.rotation.T @ (self.block - self.position), self.yaw - self.hand_yaw
        # Fingers that are already further closed (an empty fist beside the block) have nothing between them.
        if self.held or (around and before >= task.FINGERS_ON_BLOCK):
            self.opening = max(self.opening, task.FINGERS_ON_BLOCK)

    def _release(self) -> bool:
        """Drop the block if the fingers that hold it are open; returns whether that was at its place."""
        if not self.held or self.opening <= task.FINGERS_CLOSED:
            return False
        success = bool(np.linalg.norm(self.block - task.PLACE) <= self.config.place_tolerance)
        self.block[2], self.held = task.BLOCK_REST_Z, False
        return success

    def _observation(self) -> Observation:
        k = task.POSITION_SCALE
        parts: list[np.ndarray] = [
            np.array([self.opening]),
            k * self.position,
            self.rotation[:, 2],
            self.rotation[:, 1],
        ]
        if self.config.observe_objects:
            parts += [k * (self.block - self.position), np.array([np.cos(2 * self.yaw), np.sin(2 * self.yaw)])]
        observation = {STATE: np.concatenate(parts).astype(np.float32)}
        if self.images == "always":
            observation.update(self.read_images())
        return observation


def _turn(vector: np.ndarray) -> np.ndarray:
    """The rotation by the vector's length (rad) about its direction, `float64[3, 3]` (Rodrigues' formula)."""
    angle = float(np.linalg.norm(vector))
    if angle < 1e-12:
        return np.eye(3)
    x, y, z = vector / angle
    cross = np.array([[0.0, -z, y], [z, 0.0, -x], [-y, x, 0.0]])
    return np.eye(3) + np.sin(angle) * cross + (1.0 - np.cos(angle)) * (cross @ cross)

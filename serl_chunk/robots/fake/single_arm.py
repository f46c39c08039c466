"""The fake single arm: a hand over a table, commanded by velocities, a block to pick up and place, and two cameras."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from serl_chunk.config.robots import FakeSingleArmConfig, ScriptedHumanConfig
from serl_chunk.robots.base import Expert, InterventionSource, SimulatedEnv, moves_spec
from serl_chunk.robots.fake.render import FINGER, FINGER_TRAVEL, HAND, PALM, RED, Camera, Rod, background, draw, point
from serl_chunk.robots.fake.scripted_human import InterveningHuman
from serl_chunk.types import RobotSpec
from serl_chunk_robot.geometry.rotations import rotation

CAMERAS = ("side", "wrist")
ACTION_DIM = 7  # linear velocity, angular velocity, gripper velocity
HAND_DIM = 10  # opening, position, the hand's forward and finger axes
STATE_DIM = HAND_DIM + 5  # and the block relative to the hand, and its yaw
POSITION_SCALE = 5.0  # of metres in the state, so that they vary about as much as unit vectors

LINEAR_SPEED = 0.3  # m/s at an action of 1
ANGULAR_SPEED = 1.5  # rad/s
GRIPPER_SPEED = 4.0  # openings/s

WORKSPACE_LOW, WORKSPACE_HIGH = (0.3, -0.25, 0.005), (0.7, 0.25, 0.35)  # m, of the grip point
MAX_TILT = 0.6  # rad of the hand from straight down; no turn exceeds it

FINGERS_CLOSED = 0.4  # fingers that cross this opening downwards grasp; above it they release
FINGERS_ON_BLOCK = 0.3  # opening at which a held block stops the fingers

BLOCK_LENGTH, BLOCK_WIDTH = 0.08, 0.03  # m; the fingers close across the width
BLOCK_REST_Z = BLOCK_WIDTH / 2
BLOCK_START_LOW, BLOCK_START_HIGH = (0.38, -0.18), (0.58, 0.02)  # m, x and y of its centre
BLOCK_START_YAW = 1.0  # rad, uniform +-
PLACE = (0.5, 0.17, BLOCK_REST_Z)  # m, where the block must be released
PLACE_DISTANCE = 0.04  # m from it at which releasing counts
GRASP_DISTANCE = 0.02  # m of grip point and block that can be held
GRASP_ANGLE = 0.4  # rad of fingers and short side that can be held

HOME = (0.48, 0.0, 0.2)  # m, of the grip point, the hand straight down
START_NOISE = 0.02  # m, uniform +-, of the start's position
START_TURN_NOISE = 0.1  # rad, the same of the hand's turn about each axis
DOWN = np.array([[1.0, 0.0, 0.0], [0.0, -1.0, 0.0], [0.0, 0.0, -1.0]])  # columns: x, finger and forward axis

STALL_TICKS = 8  # without a rise of the progress measure before the human reacts; 0.8 s at 10 Hz
_HUMAN = ScriptedHumanConfig(stall_ticks=STALL_TICKS, correction_ticks=(5, 15), speed=(0.5, 0.8), noise=0.1)

_HOVER = 0.1  # m above the block at which the hand comes from afar
_AROUND = 0.03  # m next to the block at which it may go down
_CLOSE_WITHIN = 0.008  # m from the block's centre at which the fingers close
_ALIGNED = 0.15  # rad
_RELEASE_WITHIN = 0.015  # m from the place
_CARRY_Z = 0.1  # m, of the block while it is carried
_NOISE_MEMORY = 0.6  # AR(1) coefficient per tick of the hand's noise


def fake_single_arm_spec(config: FakeSingleArmConfig) -> RobotSpec:
    """Return the specification: 7 velocities in [-1, 1], two cameras, 15 state numbers (10 without objects)."""
    state_dim, limit = STATE_DIM if config.observe_objects else HAND_DIM, config.max_episode_steps
    # The gripper's is a push, as HIL-SERL's: repeated on a tick without an action, the fingers continue their movement.
    return moves_spec(config.kind, config.control_hz, state_dim, ACTION_DIM, (6,), CAMERAS, config.image_size, limit)


class FakeSingleArmEnv(SimulatedEnv):
    """Pick the block up and release it at a fixed place, with end-effector velocities as HIL-SERL's robots take them.

    Actions are `float32[7]` in [-1, 1]: the grip point's velocity in the world (times 0.3 m/s), the hand's angular
    velocity in the world (times 1.5 rad/s) and the fingers' (times 4 openings/s, positive opens); zeros hold still. The
    hand stays in its workspace and within 0.6 rad of straight down. The state is `float32[15]`: opening, 5 times the
    grip point's position (m), the hand's forward and finger axes (unit vectors), then with `observe_objects` 5 times
    the block's centre relative to the grip point and the cosine and sine of twice its yaw (its two ends look alike).

    Fingers grasp by closing: their opening must cross 0.4 downwards while the grip point is within GRASP_DISTANCE of
    the block's centre and the finger axis within GRASP_ANGLE of its short side. The block stops the fingers at 0.3
    and moves with the hand. Opened fingers let it fall. Reward is 1 and the episode terminates when it is released
    within PLACE_DISTANCE of the place (in three dimensions); else 0.
    """

    def __init__(self, config: FakeSingleArmConfig, *, images: str = "on_request") -> None:
        self.config = config
        self._set_spaces(fake_single_arm_spec(config), images)
        self.position, self.rotation, self.opening = np.array(HOME), DOWN.copy(), 1.0
        self.block, self.yaw = np.array((*BLOCK_START_LOW, BLOCK_REST_Z)), 0.0
        self.held, self.place = False, np.array(PLACE)
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
        return SingleArmExpert(self)

    def make_scripted_human(self) -> InterventionSource:
        return SingleArmHuman(self)

    def _start(self, seed: int | None) -> dict[str, Any]:
        draw = self.np_random.uniform
        self.block = np.append(draw(BLOCK_START_LOW, BLOCK_START_HIGH), BLOCK_REST_Z)
        self.yaw = float(draw(-BLOCK_START_YAW, BLOCK_START_YAW))
        self.position = HOME + draw(-START_NOISE, START_NOISE, 3)
        self.rotation = rotation(draw(-START_TURN_NOISE, START_TURN_NOISE, 3)) @ DOWN
        self.opening, self.held = 1.0, False
        return {}

    def _move(self, action: np.ndarray) -> tuple[float, dict[str, Any]]:
        executed = np.clip(action, -1.0, 1.0)
        velocity, dt = executed.astype(np.float64), self.robot_spec.dt
        moved = self.position + velocity[:3] * (LINEAR_SPEED * dt)
        self.position = np.clip(moved, WORKSPACE_LOW, WORKSPACE_HIGH)
        turned = rotation(velocity[3:6] * (ANGULAR_SPEED * dt)) @ self.rotation
        if -turned[2, 2] >= np.cos(MAX_TILT):
            self.rotation = turned
        before = self.opening
        self.opening = float(np.clip(before + velocity[6] * GRIPPER_SPEED * dt, 0.0, 1.0))

        if self.held:
            self.block = self.position + self.rotation @ self.offset
            self.block[2] = max(self.block[2], BLOCK_REST_Z)
            self.yaw = self.hand_yaw + self._offset_yaw
        self._close_fingers(before)
        success = self._release()
        return success, {"success": success, "executed_action": executed}

    def _frame(self, camera: str) -> np.ndarray:
        return render(camera, self)

    def _close_fingers(self, before: float) -> None:
        """Let the block stop the fingers, and hold it if they closed on it on this tick."""
        near = np.linalg.norm(self.block - self.position) <= GRASP_DISTANCE
        around = near and abs(self.misalignment) <= GRASP_ANGLE
        if before > FINGERS_CLOSED >= self.opening and around:
            self.held = True
            self.offset, self._offset_yaw = self.rotation.T @ (self.block - self.position), self.yaw - self.hand_yaw
        # Fingers that are already further closed (an empty fist next to the block) have nothing between them.
        if self.held or (around and before >= FINGERS_ON_BLOCK):
            self.opening = max(self.opening, FINGERS_ON_BLOCK)

    def _release(self) -> bool:
        """Drop the block if the fingers that hold it are open; return whether that was at its place."""
        if not self.held or self.opening <= FINGERS_CLOSED:
            return False
        success = bool(np.linalg.norm(self.block - self.place) <= PLACE_DISTANCE)
        self.block[2], self.held = BLOCK_REST_Z, False
        return success

    def _state(self) -> np.ndarray:
        k, forward, finger = POSITION_SCALE, self.rotation[:, 2], self.rotation[:, 1]
        parts = [np.array([self.opening]), k * self.position, forward, finger]
        if self.config.observe_objects:
            parts += [k * (self.block - self.position), np.array([np.cos(2 * self.yaw), np.sin(2 * self.yaw)])]
        return np.concatenate(parts).astype(np.float32)


def render(name: str, env: FakeSingleArmEnv) -> np.ndarray:
    """Draw what camera `name` (`side` or `wrist`) sees: `uint8[size, size, 3]`, RGB."""
    forward, finger = env.rotation[:, 2], env.rotation[:, 1]
    if name == "wrist":
        eye = env.position - 0.16 * forward + 0.07 * env.rotation[:, 0]
        camera = _looking(eye, env.position - eye, env.rotation[:, 1], 1.2)
    else:
        eye = np.array([1.15, 0.0, 0.5])
        camera = _looking(eye, np.array([0.5, 0.0, 0.05]) - eye, np.array([0.0, 1.0, 0.0]), 1.9)
    palm = env.position - PALM * forward
    rods = [Rod(point(palm - 0.12 * forward), point(palm), 0.03, HAND[0])]
    for side in (-1.0, 1.0):
        spread = side * (0.006 + FINGER_TRAVEL * env.opening) * finger
        rods.append(Rod(point(palm + spread), point(env.position + spread), 0.007, FINGER))
    half = (BLOCK_LENGTH - BLOCK_WIDTH) / 2 * np.array([np.cos(env.yaw), np.sin(env.yaw), 0.0])
    rods.append(Rod(point(env.block - half), point(env.block + half), BLOCK_WIDTH / 2, RED))
    return draw(background(camera, env.config.image_size, point(env.place)), camera, rods)


def _looking(eye: np.ndarray, ahead: np.ndarray, right: np.ndarray, focal: float) -> Camera:
    """Return a camera at `eye` whose image's x axis is nearest to `right`."""
    ahead = ahead / np.linalg.norm(ahead)
    right = right - (right @ ahead) * ahead
    right = right / np.linalg.norm(right)
    return Camera(point(eye), point(right), point(np.cross(ahead, right)), point(ahead), focal)


class SingleArmExpert:
    """Goes above the block, turns to it, grasps, carries, places; opens again after a missed grasp. Keeps only its
    noise.

    Args:
        speed: range from which `reset` draws the share of full speed used.
        noise: standard deviation of smooth noise on the six velocities, in units of full speed.
    """

    def __init__(self, env: FakeSingleArmEnv, *, speed: tuple[float, ...] = (0.7, 1.0), noise: float = 0.05) -> None:
        self._env, self._speed_range, self.noise = env, speed, noise
        self.reset(0)

    def reset(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._speed = float(self._rng.uniform(self._speed_range[0], self._speed_range[1]))
        self._disturbance = np.zeros(6)

    def act(self) -> np.ndarray:
        """Return the command for the current tick, `float32[7]` in [-1, 1]."""
        env = self._env
        fresh = self.noise * math.sqrt(1 - _NOISE_MEMORY**2) * self._rng.standard_normal(6)
        self._disturbance = _NOISE_MEMORY * self._disturbance + fresh
        target, opening = self._goal()
        linear = (target - env.position) / (LINEAR_SPEED * env.robot_spec.dt)
        # Upright: the turn that brings the forward axis down, and the yaw to the block's (free hands only).
        upright = np.cross(env.rotation[:, 2], (0.0, 0.0, -1.0))
        turn = np.array([0.0, 0.0, 0.0 if env.held else env.misalignment])
        angular = (upright + turn) / (ANGULAR_SPEED * env.robot_spec.dt)
        # One factor for each velocity: the hand moves on a straight line.
        linear *= min(1.0, self._speed / max(1e-9, float(np.linalg.norm(linear))))
        angular *= min(1.0, self._speed / max(1e-9, float(np.linalg.norm(angular))))
        moving = np.concatenate([linear, angular]) + self._disturbance
        return np.clip(np.append(moving, opening), -1.0, 1.0).astype(np.float32)

    def _goal(self) -> tuple[np.ndarray, float]:
        env = self._env
        place = env.place
        if env.held:
            offset = env.position - env.block
            if np.linalg.norm(env.block - place) < _RELEASE_WITHIN:
                return env.position, 1.0
            if np.linalg.norm((env.block - place)[:2]) > _AROUND:  # up first, then across
                lifted = env.block[2] > _CARRY_Z / 2
                goal = np.append(place[:2] if lifted else env.block[:2], _CARRY_Z)
                return goal + offset, -1.0
            return place + offset, -1.0
        distance = np.linalg.norm(env.position - env.block)
        if env.opening < 0.95 and distance > 2 * _CLOSE_WITHIN:
            return env.block + np.array([0.0, 0.0, _HOVER / 2]), 1.0  # a missed grasp, or a fist
        if distance < _CLOSE_WITHIN and abs(env.misalignment) < _ALIGNED:
            return env.block, -1.0
        if env.opening < 0.95:  # has begun to close
            return env.block, 1.0 if env.opening <= FINGERS_CLOSED else -1.0  # missed it, or goes on
        down = np.linalg.norm((env.position - env.block)[:2]) < _AROUND and abs(env.misalignment) < _ALIGNED
        return (env.block if down else env.block + np.array([0.0, 0.0, _HOVER])), 1.0


def progress(env: FakeSingleArmEnv) -> float:
    """Measure progress: 0-1 reaching and turning, 1-2 placing."""
    if env.held:
        return 2.0 - min(float(np.linalg.norm(env.block - env.place)) / 0.6, 1.0)
    near = 1.0 - min(float(np.linalg.norm(env.block - env.position)) / 0.6, 1.0)
    return 0.7 * near + 0.2 * (1.0 - abs(env.misalignment) / (math.pi / 2))


class SingleArmHuman(InterveningHuman):
    """Intervenes after a stall, slower and noisier than the demonstrator, until its time is up."""

    def __init__(self, env: FakeSingleArmEnv) -> None:
        super().__init__(env, _HUMAN, SingleArmExpert(env, speed=_HUMAN.speed, noise=_HUMAN.noise))

    def _watch(self) -> None:
        self._best, self._since_rise = progress(self._env), 0

    def _needed(self) -> bool:
        now = progress(self._env)
        if now > self._best + 0.005 or now < self._best - 0.5:  # better, or dropped: measured from here
            self._best, self._since_rise = now, 0
            return False
        self._since_rise += 1
        return self._since_rise >= self._config.stall_ticks

    def _standstill(self) -> np.ndarray:
        return np.zeros(ACTION_DIM, np.float32)

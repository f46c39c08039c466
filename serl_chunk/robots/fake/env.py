"""The fake ALOHA environment: two arms, one cube, a hand-over, a sparse reward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import gymnasium
import numpy as np

from serl_chunk.config.robots import FakeAlohaConfig
from serl_chunk.robots.base import Expert, InterventionSource, RobotEnv
from serl_chunk.robots.fake import spec as task
from serl_chunk.robots.fake.kinematics import LEFT, RIGHT, Point, grip_point
from serl_chunk.robots.fake.rng_state import generator_at, given_start
from serl_chunk.types import IMAGE_PREFIX, STATE, DataError, Observation

NO_ARM = -1

_RATES = tuple(
    task.GRIPPER_RATE if i in task.GRIPPER else task.JOINT_RATE for i in range(task.ACTION_DIM)
)  # per tick, whatever the tick lasts
_LIMITS = tuple(zip(task.ACTION_LOW, task.ACTION_HIGH, _RATES, strict=True))


class FakeAlohaState(NamedTuple):
    """Everything that decides how an episode goes on."""

    joints: tuple[float, ...]  # 14: radians, gripper openings
    cube: Point  # centre, metres
    holder: int  # LEFT, RIGHT or NO_ARM
    offset: Point  # cube - grip point of the holder, metres
    tick: int
    active: bool  # whether `step` may be called: False before the first reset
    rng: dict[str, Any]  # state of the generator that draws start states


class FakeAlohaEnv(RobotEnv):
    """Pick the cube with the right arm, hand it to the left arm, release it at a fixed place.

    Actions are absolute joint targets, `float32[14]` (left arm 0-5, left gripper 6, right arm 7-12, right
    gripper 13), clipped to the joint limits and then to 0.06 rad (grippers 0.2) from the present joints;
    `info["executed_action"]` is what remains. The state is `float32[23]`: 14 joints, then 5 times the cube's
    position and each grip point relative to the cube, in metres. It tells neither time nor progress nor place.
    Without `observe_objects` it is the 14 joints: `float32[14]`.

    Fingers grasp only by closing: their opening must cross 0.4 downwards while the grip point is within
    `grasp_tolerance` of the cube's centre and in the arm's own half (or 5 cm past the middle). The cube
    stops the fingers at 0.3 and moves with the grip point; the arm that closed on it last holds it. Opened
    fingers let it fall to the table below. The arms' bases are too far apart for one arm to do all of it.
    Reward is 1 and the episode terminates when the left arm releases the cube within `place_tolerance` of
    the place (in three dimensions: dropping it from above does not count); else 0.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - gymnasium declares it so

    def __init__(self, config: FakeAlohaConfig, *, images: str = "on_request") -> None:
        self.config = config
        self._set_spaces(task.fake_aloha_spec(config), images)
        self.joints: list[float] = list(task.HOME_JOINTS)
        self.cube: Point = (*task.CUBE_START_LOW, task.CUBE_REST_Z)
        self.holder = NO_ARM
        self.grips: list[Point] = [grip_point(LEFT, self.joints, 0), grip_point(RIGHT, self.joints, task.ARM_DIM)]
        self.tick = 0
        self._offset: Point = (0.0, 0.0, 0.0)
        self._active = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Draw a start state; `options={"start": state}` begins at a saved FakeAlohaState instead, at tick 0.

        A given start leaves the generator of later start states alone.
        """
        super().reset(seed=seed)
        start = given_start(options, FakeAlohaState)
        if start is not None:
            self._place(start.joints, start.cube, start.holder, start.offset)
        else:
            draw = self.np_random.uniform
            x, y = draw(task.CUBE_START_LOW, task.CUBE_START_HIGH).tolist()
            noise = draw(-task.START_JOINT_NOISE, task.START_JOINT_NOISE, task.ACTION_DIM).tolist()
            joints = [
                q if i in task.GRIPPER else q + e for i, (q, e) in enumerate(zip(task.HOME_JOINTS, noise, strict=True))
            ]
            self._place(joints, (x, y, task.CUBE_REST_Z), NO_ARM, (0.0, 0.0, 0.0))
        self.tick = 0
        self._active = True
        return self._observation(), {"success": False}

    def step(self, action: np.ndarray) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Move for one tick. Raises DataError on an action that is not 14 finite numbers."""
        if not self._active:
            raise gymnasium.error.ResetNeeded("call reset() before the first step()")
        command = np.asarray(action).tolist()
        if len(command) != task.ACTION_DIM or not math.isfinite(sum(command)):
            raise DataError(f"an action must be {task.ACTION_DIM} finite numbers, got {command}")

        joints = self.joints
        before = joints[task.GRIPPER[LEFT]], joints[task.GRIPPER[RIGHT]]
        for i, (low, high, rate) in enumerate(_LIMITS):
            target, q = command[i], joints[i]
            target = low if target < low else high if target > high else target
            joints[i] = q - rate if target < q - rate else q + rate if target > q + rate else target
        # Taken before the cube stops the fingers: a squeezing command stays a squeezing command in the record.
        executed = np.array(joints, np.float32)

        self.grips = [grip_point(LEFT, joints, 0), grip_point(RIGHT, joints, task.ARM_DIM)]
        if self.holder != NO_ARM:
            x, y, z = self.grips[self.holder]
            dx, dy, dz = self._offset
            self.cube = (x + dx, y + dy, max(z + dz, task.CUBE_REST_Z))
        for arm in (RIGHT, LEFT):
            self._close_fingers(arm, before[arm])
        success = self._release()

        self.tick += 1
        truncated = not success and self.tick >= self.config.max_episode_steps
        info = {"success": success, "executed_action": executed}
        return self._observation(), float(success), success, truncated, info

    def read_images(self, cameras: Sequence[str] | None = None) -> Observation:
        """Frames `{"images/<camera>": uint8[size, size, 3]}` of the present moment; all cameras by default."""
        from serl_chunk.robots.fake.render import render

        names = task.CAMERAS if cameras is None else cameras
        return {
            IMAGE_PREFIX + name: render(
                self.robot_spec.camera(name).name, self.config.image_size, self.joints, self.cube, self.holder != NO_ARM
            )
            for name in names
        }

    def save_state(self) -> FakeAlohaState:
        """Everything `restore_state` needs, the generator of later start states included."""
        return FakeAlohaState(
            tuple(self.joints),
            self.cube,
            self.holder,
            self._offset,
            self.tick,
            self._active,
            dict(self.np_random.bit_generator.state),
        )

    def restore_state(self, state: FakeAlohaState) -> Observation:
        """Continue from `state` bit for bit, in this or another environment of the same configuration."""
        self._place(state.joints, state.cube, state.holder, state.offset)
        self.tick, self._active = state.tick, state.active
        self.np_random = generator_at(state.rng)
        return self._observation()

    def make_expert(self) -> Expert:
        """The scripted demonstrator of this environment."""
        from serl_chunk.robots.fake.expert import ScriptedExpert

        return ScriptedExpert(self)

    def make_scripted_human(self) -> InterventionSource:
        """The scripted human who intervenes when the policy gets nowhere."""
        from serl_chunk.robots.fake.scripted_human import ScriptedHuman

        return ScriptedHuman(self, self.config.scripted_human)

    def _place(self, joints: Sequence[float], cube: Point, holder: int, offset: Point) -> None:
        self.joints = list(joints)
        self.grips = [grip_point(LEFT, self.joints, 0), grip_point(RIGHT, self.joints, task.ARM_DIM)]
        self.cube, self.holder, self._offset = cube, holder, offset

    def _close_fingers(self, arm: int, opening_before: float) -> None:
        """Let the cube stop the fingers of `arm`, and make it the holder if they closed on it on this tick."""
        gripper, grip, cube = task.GRIPPER[arm], self.grips[arm], self.cube
        around = math.dist(grip, cube) <= self.config.grasp_tolerance
        past_middle = grip[0] if arm == LEFT else -grip[0]
        closed = opening_before > task.FINGERS_CLOSED >= self.joints[gripper]
        if closed and around and past_middle <= task.OWN_HALF_BAND:
            self.holder = arm
            self._offset = (cube[0] - grip[0], cube[1] - grip[1], cube[2] - grip[2])
        # Fingers that are already further closed (an empty fist beside the cube) have nothing between them.
        if arm == self.holder or (around and opening_before >= task.FINGERS_ON_CUBE):
            self.joints[gripper] = max(self.joints[gripper], task.FINGERS_ON_CUBE)

    def _release(self) -> bool:
        """Drop the cube if its holder's fingers are open; returns whether that was at its place."""
        if self.holder == NO_ARM or self.joints[task.GRIPPER[self.holder]] <= task.FINGERS_CLOSED:
            return False
        success = self.holder == LEFT and math.dist(self.cube, task.PLACE) <= self.config.place_tolerance
        self.cube = (self.cube[0], self.cube[1], task.CUBE_REST_Z)
        self.holder = NO_ARM
        return success

    def _observation(self) -> Observation:
        if self.config.observe_objects:
            state = self._seen_state()
        else:
            state = np.array(self.joints, np.float32)
        observation = {STATE: state}
        if self.images == "always":
            observation.update(self.read_images())
        return observation

    def _seen_state(self) -> np.ndarray:
        """Joints, the cube and both grip points relative to it, `float32[23]`."""
        (cx, cy, cz), k = self.cube, task.POSITION_SCALE
        (lx, ly, lz), (rx, ry, rz) = self.grips
        cube = (k * cx, k * cy, k * cz)
        left = (k * (lx - cx), k * (ly - cy), k * (lz - cz))
        right = (k * (rx - cx), k * (ry - cy), k * (rz - cz))
        return np.array((*self.joints, *cube, *left, *right), np.float32)

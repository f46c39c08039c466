"""The fake ALOHA environment: two arms, one cube, a hand-over, a sparse reward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np

from serl_chunk.config.robots import FakeAlohaConfig
from serl_chunk.robots.base import Expert, InterventionSource, SimulatedEnv
from serl_chunk.robots.fake import spec as task
from serl_chunk.robots.fake.kinematics import LEFT, RIGHT, Point, grip_point

NO_ARM = -1

_LIMITS = tuple(zip(task.ACTION_LOW, task.ACTION_HIGH, task.RATES, strict=True))


class FakeAlohaEnv(SimulatedEnv):
    """Pick the cube with the right arm, hand it to the left arm, release it at a fixed place.

    Actions are absolute joint targets, `float32[14]` (left arm 0-5, left gripper 6, right arm 7-12, right gripper 13),
    clipped to the joint limits and then to 0.06 rad (grippers 0.2) from the current joints; `info["executed_action"]`
    is what remains. The state is `float32[23]`: 14 joints, then 5 times the cube's position and each grip point
    relative to the cube, in metres; without `observe_objects` the joints alone.

    Fingers grasp by closing: their opening must cross 0.4 downwards while the grip point is within `grasp_tolerance` of
    the cube's centre and in the arm's own half (or 5 cm past the middle). The cube stops the fingers at 0.3 and moves
    with the grip point; the arm that closed on it last holds it. Opened fingers let it fall. The arms' bases are too
    far apart for one arm to do all of it. Reward is 1 and the episode terminates when the left arm releases the cube
    within `task.PLACE_DISTANCE` of the place (in three dimensions: dropping it from above does not count); else 0.
    """

    def __init__(self, config: FakeAlohaConfig, *, images: str = "on_request") -> None:
        self.config = config
        self._set_spaces(task.fake_aloha_spec(config), images)
        self.place(task.HOME_JOINTS, (*task.CUBE_START_LOW, task.CUBE_REST_Z))

    def place(
        self, joints: Sequence[float], cube: Point, holder: int = NO_ARM, offset: Point = (0.0, 0.0, 0.0)
    ) -> None:
        """Set the state of the task: 14 `joints` (radians, gripper openings), and the `cube`'s centre (m).

        `holder` is LEFT, RIGHT or NO_ARM; `offset` is cube - grip point of the holder, metres.
        """
        self.joints = list(joints)
        self.grips = [grip_point(LEFT, self.joints, 0), grip_point(RIGHT, self.joints, task.ARM_DIM)]
        self.cube, self.holder, self._offset = cube, holder, offset

    def make_expert(self) -> Expert:
        from serl_chunk.robots.fake.expert import ScriptedExpert

        return ScriptedExpert(self)

    def make_scripted_human(self) -> InterventionSource:
        from serl_chunk.robots.fake.scripted_human import ScriptedHuman

        return ScriptedHuman(self, self.config.scripted_human)

    def _start(self, seed: int | None) -> dict[str, Any]:
        cube = self._draw_cube()
        noise = self.np_random.uniform(-task.START_JOINT_NOISE, task.START_JOINT_NOISE, task.ACTION_DIM).tolist()
        home = enumerate(zip(task.HOME_JOINTS, noise, strict=True))
        self.place([q if i in task.GRIPPER else q + e for i, (q, e) in home], cube)
        return {}

    def reset_cube(self, seed: int) -> None:
        """Put the cube where `reset` with this seed does, held by no arm; the arms stay where they are."""
        gymnasium.Env.reset(self, seed=seed)
        self.place(self.joints, self._draw_cube())

    def _draw_cube(self) -> Point:
        x, y = self.np_random.uniform(task.CUBE_START_LOW, task.CUBE_START_HIGH).tolist()
        return x, y, task.CUBE_REST_Z

    def _checked(self, action: Any, name: str = "action") -> np.ndarray:
        super()._checked(action, name)
        return np.asarray(action).reshape(-1)  # float64 joints are exact: an arm sent to them stands still

    def _move(self, action: np.ndarray) -> tuple[float, dict[str, Any]]:
        joints, command = self.joints, action.tolist()
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
        return success, {"success": success, "executed_action": executed}

    def _frame(self, camera: str) -> np.ndarray:
        from serl_chunk.robots.fake.render import render

        return render(camera, self.config.image_size, self.joints, self.cube, self.holder != NO_ARM)

    def _close_fingers(self, arm: int, opening_before: float) -> None:
        """Let the cube stop the fingers of `arm`, and make it the holder if they closed on it on this tick."""
        gripper, grip, cube = task.GRIPPER[arm], self.grips[arm], self.cube
        around = math.dist(grip, cube) <= self.config.grasp_tolerance
        past_middle = grip[0] if arm == LEFT else -grip[0]
        closed = opening_before > task.FINGERS_CLOSED >= self.joints[gripper]
        if closed and around and past_middle <= task.OWN_HALF_BAND:
            self.holder = arm
            self._offset = (cube[0] - grip[0], cube[1] - grip[1], cube[2] - grip[2])
        # Fingers that are already further closed (an empty fist next to the cube) have nothing between them.
        if arm == self.holder or (around and opening_before >= task.FINGERS_ON_CUBE):
            self.joints[gripper] = max(self.joints[gripper], task.FINGERS_ON_CUBE)

    def _release(self) -> bool:
        """Drop the cube if its holder's fingers are open; return whether that was at its place."""
        if self.holder == NO_ARM or self.joints[task.GRIPPER[self.holder]] <= task.FINGERS_CLOSED:
            return False
        success = self.holder == LEFT and math.dist(self.cube, task.PLACE) <= task.PLACE_DISTANCE
        self.cube = (self.cube[0], self.cube[1], task.CUBE_REST_Z)
        self.holder = NO_ARM
        return success

    def _state(self) -> np.ndarray:
        objects = self.objects() if self.config.observe_objects else ()
        return np.array((*self.joints, *objects), np.float32)

    def objects(self) -> tuple[float, ...]:
        """The nine numbers that follow the joints in the state: see the class."""
        (cx, cy, cz), k = self.cube, task.POSITION_SCALE
        (lx, ly, lz), (rx, ry, rz) = self.grips
        left, right = (k * (lx - cx), k * (ly - cy), k * (lz - cz)), (k * (rx - cx), k * (ry - cy), k * (rz - cz))
        return k * cx, k * cy, k * cz, *left, *right

"""robomimic's tasks in robosuite with low-dimensional observations, and their specifications.

The settings of the simulation are those of robomimic's data sets of version 1.5 (their `env_args`), so that a recorded
action does here what it did there. robomimic itself is not needed. A test compares every specification with the
environment itself, where robosuite is installed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from serl_chunk import extras
from serl_chunk.config.robots import RobomimicConfig
from serl_chunk.robots.base import RobotEnv
from serl_chunk.robots.mujoco_camera import MujocoCamera
from serl_chunk.types import IMAGE_PREFIX, STATE, CameraSpec, DataError, Observation, RobotSpec

CONTROL_HZ = 20.0
ACTIONS = 7  # moves of the hand: x, y, z (up to 5 cm), axis-angle (0.5 rad each), and the gripper; each in -1..1
GRIPPER = 6  # the action dimension of the gripper, 1 closes
CAMERA = "agentview"
STATE_KEYS = ("robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos", "object-state")
"""What a state is made of, by robosuite's names, in the order of `data.formats.robomimic` (there: `object`)."""
_ROBOT_DIM = 3 + 4 + 2


class Task(NamedTuple):
    """A task of robomimic in robosuite."""

    environment: str  # robosuite's name
    object_dim: int
    max_episode_steps: int  # of the published results


TASKS = {
    "lift": Task("Lift", 10, 300),
    "can": Task("PickPlaceCan", 14, 300),
    "square": Task("NutAssemblySquare", 14, 400),
}


def robomimic_spec(config: RobomimicConfig) -> RobotSpec:
    """What learner and actor share about a task of robomimic.

    Actions are `float32[7]` in -1..1, differences that no state measures (see `ACTIONS`). The state is `STATE_KEYS`.
    """
    task = TASKS[config.env_name]
    return RobotSpec(
        name=f"robomimic {config.env_name}",
        control_hz=CONTROL_HZ,
        state_dim=_ROBOT_DIM + task.object_dim,
        action_low=(-1.0,) * ACTIONS,
        action_high=(1.0,) * ACTIONS,
        joint_of_action=(-1,) * ACTIONS,
        grippers=(GRIPPER,),
        cameras=(CameraSpec(CAMERA, config.image_size, config.image_size),),
        max_episode_steps=config.max_episode_steps or task.max_episode_steps,
    )


_MOVE = [0.05, 0.05, 0.05, 0.5, 0.5, 0.5]  # metres and radians that an action of 1 asks for
_CONTROLLER = {
    "type": "BASIC",
    "body_parts": {
        "right": {
            "type": "OSC_POSE",
            "input_max": 1,
            "input_min": -1,
            "output_max": _MOVE,
            "output_min": [-x for x in _MOVE],
            "kp": 150,
            "damping_ratio": 1,
            "impedance_mode": "fixed",
            "kp_limits": [0, 300],
            "damping_ratio_limits": [0, 10],
            "position_limits": None,
            "orientation_limits": None,
            "uncouple_pos_ori": True,
            "input_type": "delta",
            "input_ref_frame": "world",
            "interpolation": None,
            "ramp_ratio": 0.2,
            "gripper": {"type": "GRIP"},
        }
    },
}
_COLLISION = 0  # the group of the shapes that robosuite collides with, beside those that it shows


class RobomimicEnv(RobotEnv):
    """Lift, can or square with a Panda arm.

    `step` returns reward 1 and terminates where the task is solved after it, else 0; it truncates after the
    specification's `max_episode_steps`. Every reset draws the objects anew, also their size where the task says so:
    `reset(seed=...)` reproduces it.

    Raises ConfigError where robosuite is not installed.
    """

    def __init__(self, config: RobomimicConfig, *, images: str = "on_request") -> None:
        self._set_spaces(robomimic_spec(config), images)
        package = extras.robosuite(f"robot {config.kind}")
        logging.getLogger("robosuite_logs").setLevel(logging.ERROR)  # it announces every file it reads
        self._kind, self._size = config.kind, config.image_size
        self.simulation: Any = package.make(
            TASKS[config.env_name].environment,
            robots="Panda",
            controller_configs=_CONTROLLER,
            control_freq=CONTROL_HZ,
            has_renderer=False,
            has_offscreen_renderer=False,
            use_camera_obs=False,
            use_object_obs=True,
            reward_shaping=False,
            ignore_done=True,
            lite_physics=False,
        )
        self._camera: MujocoCamera | None = None
        self._tick = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict]:
        """A new start state; `options` are not used."""
        super().reset(seed=seed)
        self._close_camera()  # robosuite makes a new model
        draw = int(self.np_random.integers(2**32))
        others = np.random.get_state()  # noqa: NPY002 (robosuite draws start states from numpy's global generator)
        np.random.seed(draw)  # noqa: NPY002
        try:
            self.simulation.rng = np.random.default_rng(draw)  # what its later versions draw from
            observation = self.simulation.reset()
        finally:
            np.random.set_state(others)  # noqa: NPY002
        self._tick = 0
        return self._observe(observation), {"success": False}

    def step(self, action: np.ndarray) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """One tick (50 ms) with `action float32[7]`; values past -1..1 are clipped.

        Raises DataError for an action that is not 7 finite numbers, and where the simulation has diverged.
        """
        action = np.asarray(action, np.float32)
        if action.shape != (ACTIONS,) or not np.isfinite(action).all():
            raise DataError(f"an action of {self.robot_spec.name} is {ACTIONS} finite numbers, got {action}")
        executed = np.clip(action, -1, 1)
        observation, reward, _, _ = self.simulation.step(executed)
        self._tick += 1
        success = bool(reward > 0)  # robosuite's sparse reward: 1, but for rounding, where the task is solved
        truncated = not success and self._tick >= self.robot_spec.max_episode_steps
        info = {"success": success, "executed_action": executed}
        return self._observe(observation), float(success), success, truncated, info

    def read_images(self, cameras: Sequence[str] | None = None) -> Observation:
        """Render the camera: `{"images/agentview": uint8[image_size, image_size, 3]}`.

        Raises ConfigError for an unknown camera, or where no OpenGL context can be made.
        """
        frames = {}
        sim = self.simulation.sim
        for name in [c.name for c in self.robot_spec.cameras] if cameras is None else cameras:
            self.robot_spec.camera(name)
            if self._camera is None:
                mujoco = extras.mujoco(f"robot {self._kind}", "robomimic")
                self._camera = MujocoCamera(mujoco, sim.model._model, self._size, hidden=(_COLLISION,))
            frames[IMAGE_PREFIX + name] = self._camera.frame(sim.data._data, name)
        return frames

    def close(self) -> None:
        """Free the simulation and the OpenGL context."""
        self._close_camera()
        self.simulation.close()

    def _close_camera(self) -> None:
        if self._camera is not None:
            self._camera.close()
            self._camera = None

    def _observe(self, values: dict[str, np.ndarray]) -> Observation:
        state = np.concatenate([np.ravel(values[key]) for key in STATE_KEYS]).astype(np.float32)
        if not np.isfinite(state).all():
            raise DataError(f"{self.robot_spec.name}: the simulation gave a state that is not finite, at {self._tick}")
        observation: Observation = {STATE: state}
        if self.images == "always":
            observation.update(self.read_images())
        return observation

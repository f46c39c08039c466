"""robomimic's tasks in robosuite with low-dimensional observations, and their specifications.

The settings are those of robomimic's data sets of version 1.5 (their `env_args`), so that a recorded action has the
same effect. robomimic itself is not needed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from serl_chunk import extras
from serl_chunk.config.robots import RobomimicConfig
from serl_chunk.robots.base import moves_spec
from serl_chunk.robots.mujoco_camera import MujocoEnv
from serl_chunk.types import RobotSpec

CONTROL_HZ = 20.0
ACTIONS = 7  # moves of the hand: x, y, z (up to 5 cm), axis-angle (0.5 rad each), and the gripper; each in -1..1
GRIPPER = 6  # the action dimension of the gripper, 1 closes
CAMERA = "agentview"
STATE_KEYS = ("robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos", "object-state")
"""Parts of the state by robosuite's names, in the order of `data.fields.CONVENTIONS` (there: `object`)."""


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
    """Return the specification of a task of robomimic.

    Actions are `float32[7]` in -1..1, differences that no state measures (see `ACTIONS`). The state is `STATE_KEYS`.
    """
    task = TASKS[config.env_name]
    name, state_dim = f"robomimic {config.env_name}", 3 + 4 + 2 + task.object_dim
    steps = config.max_episode_steps or task.max_episode_steps
    return moves_spec(name, CONTROL_HZ, state_dim, ACTIONS, (GRIPPER,), (CAMERA,), config.image_size, steps)


_CONTROLLER = Path(__file__).with_name("robomimic_controller.json")  # an action of 1 is 5 cm or 0.5 rad


class RobomimicEnv(MujocoEnv):
    """Lift, can or square with a Panda arm; a tick is 50 ms. Raises ConfigError if robosuite is not installed.

    `step` returns reward 1 and terminates if the task is solved after it, else 0. Every reset draws the objects anew,
    and their size if the task has a range of sizes.
    """

    hidden = (0,)  # the group of the shapes that robosuite collides with, next to the visible ones

    def __init__(self, config: RobomimicConfig, *, images: str = "on_request") -> None:
        self._set_spaces(robomimic_spec(config), images)
        package = extras.robosuite(f"robot {config.kind}")
        self._kind = config.kind
        controller = json.loads(_CONTROLLER.read_text())
        off = dict.fromkeys(("has_renderer", "has_offscreen_renderer", "use_camera_obs", "reward_shaping"), False)
        self.simulation: Any = package.make(
            TASKS[config.env_name].environment, robots="Panda", controller_configs=controller,
            control_freq=CONTROL_HZ, use_object_obs=True, ignore_done=True, lite_physics=False, **off,
        )  # fmt: skip

    def close(self) -> None:
        super().close()
        self.simulation.close()

    def _start(self, seed: int | None) -> dict[str, Any]:
        super().close()  # the camera: robosuite makes a new model
        draw = int(self.np_random.integers(2**32))
        others = np.random.get_state()  # noqa: NPY002 (robosuite draws start states from numpy's global generator)
        np.random.seed(draw)  # noqa: NPY002
        try:
            self.simulation.rng = np.random.default_rng(draw)  # what its later versions draw from
            self._observation = self.simulation.reset()
        finally:
            np.random.set_state(others)  # noqa: NPY002
        return {}

    def _move(self, action: np.ndarray) -> tuple[float, dict[str, Any]]:
        executed = np.clip(action, -1, 1)
        self._observation, reward, _, _ = self.simulation.step(executed)
        success = bool(reward > 0)  # robosuite's sparse reward: 1, but for rounding, where the task is solved
        return success, {"success": success, "executed_action": executed}

    def _state(self) -> np.ndarray:
        return np.concatenate([np.ravel(self._observation[key]) for key in STATE_KEYS]).astype(np.float32)

    def _scene(self) -> tuple[Any, Any, Any]:
        sim = self.simulation.sim
        return extras.mujoco(f"robot {self._kind}", "robomimic"), sim.model._model, sim.data._data

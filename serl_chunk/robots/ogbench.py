"""OGBench's single-task manipulation environments, and their specifications without the simulator.

OGBench's own single tasks judge the state *before* an action: an episode continues for one step after its success. Here
the state after it decides, as in the data (`data/formats/ogbench.py`).
"""

from __future__ import annotations

import difflib
from typing import Any

import numpy as np

from serl_chunk import extras
from serl_chunk.config.robots import OgbenchConfig
from serl_chunk.robots.base import moves_spec
from serl_chunk.robots.mujoco_camera import MujocoEnv
from serl_chunk.types import ConfigError, RobotSpec

CONTROL_HZ = 20.0
ACTIONS = 5  # moves of the gripper: x, y, z (up to 5 cm), yaw (0.3 rad), and of its opening; each in -1..1
CAMERA = "front"
GRIPPER = 4  # the action dimension of the opening
DATA = ("play", "noisy")  # kinds of data sets; the environment is the same
TASKS = 5


ENVIRONMENTS = {  # dimension of the state, time limit in ticks
    "cube-single": (28, 200),
    "cube-double": (37, 500),
    "cube-triple": (46, 1000),
    "cube-quadruple": (55, 1000),
    "cube-octuple": (91, 1500),
    "scene": (40, 750),
    "puzzle-3x3": (55, 500),
    "puzzle-4x4": (83, 500),
    "puzzle-4x5": (99, 1000),
    "puzzle-4x6": (115, 1000),
}


def ogbench_spec(config: OgbenchConfig) -> RobotSpec:
    """Return the specification of an OGBench environment; raises ConfigError for an unknown one.

    Actions are `float32[5]` in -1..1, differences that no state measures (see `ACTIONS`). The state is OGBench's own
    observation: joints, gripper, objects. The specification's name tells tasks and a dense reward apart for the
    handshake.
    """
    name, tasks = config.env_name, ["", *(f"-task{i}" for i in range(1, TASKS + 1))]
    names = [f"{env}-{data}-singletask{task}-v0" for env in ENVIRONMENTS for data in DATA for task in tasks]
    if name not in names:
        near = difflib.get_close_matches(name, names, 1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"not a single-task environment of OGBench (got {name}, expected ENV-{'|'.join(DATA)}-singletask-taskN-v0 "
            f"with N from 1 to {TASKS}, or without -taskN for the default task, and ENV one of "
            f"{', '.join(ENVIRONMENTS)}).{hint}",
            parameter="robot.env_name",
        )
    state_dim, limit = ENVIRONMENTS[next(e for e in ENVIRONMENTS if name.startswith(f"{e}-"))]
    shown, steps = name if config.reward == "sparse" else f"{name} with dense reward", config.max_episode_steps or limit
    return moves_spec(shown, CONTROL_HZ, state_dim, ACTIONS, (GRIPPER,), (CAMERA,), config.image_size, steps)


class OgbenchEnv(MujocoEnv):
    """One task of cube, scene or puzzle, states only; a tick is 50 ms. Start states are OGBench's own for a seed.

    `step` returns 1 and terminates when the task is solved. Before that it returns 0, or with `config.reward="dense"` 1
    minus `info["missing"]`, the number of parts (cubes, buttons, drawer, window) that are not yet in place. Raises
    ConfigError if OGBench is not installed or too old.
    """

    def __init__(self, config: OgbenchConfig, *, images: str = "on_request") -> None:
        self._set_spaces(ogbench_spec(config), images)
        package = extras.ogbench(f"robot {config.kind}")
        options = {"env_only": True, "success_timing": "post", "disable_env_checker": True}
        try:
            env = package.make_env_and_datasets(config.env_name, **options)
        except TypeError as error:  # before 1.2 there is no success_timing
            raise ConfigError(
                f"robot {config.kind}: this version of OGBench is too old ({error}). Run "
                "pip install --upgrade 'serl-chunk[ogbench]'"
            ) from error
        # Without gymnasium's wrappers: the time limit is the specification's, and their checks cost as much as a step.
        self.simulation: Any = env.unwrapped
        self._dense = config.reward == "dense"

    def close(self) -> None:
        self.simulation.close()
        super().close()

    def _start(self, seed: int | None) -> dict[str, Any]:
        self._observation, _ = self.simulation.reset(seed=seed)
        # OGBench takes two unseeded random steps on the way, which leave MuJoCo's solver another place to start from.
        self.simulation.data.qacc_warmstart[:] = 0
        return {}

    def _move(self, action: np.ndarray) -> tuple[float, dict[str, Any]]:
        executed = np.clip(action, -1, 1)
        self._observation, reward, success, _, _ = self.simulation.step(executed)
        success = bool(success)
        missing = -round(float(reward))  # OGBench's reward, for a single task
        info = {"success": success, "missing": missing, "executed_action": executed}
        return 1.0 - missing if self._dense else success, info

    def _state(self) -> np.ndarray:
        return np.asarray(self._observation, np.float32)

    def _scene(self) -> tuple[Any, Any, Any]:
        return extras.mujoco(self.robot_spec.name, "ogbench"), self.simulation.model, self.simulation.data

"""OGBench's single-task manipulation environments, and their specifications without the simulator.

OGBench's own environments judge, for a single task, the state *before* an action, so that an episode goes on for one
step after its success. Here the state after it decides, as in the data (`data/formats/success_labels.py`): the step
that reaches the success has reward 1 and ends the episode. A test compares every specification with the environment.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from serl_chunk import extras
from serl_chunk.config.robots import OgbenchConfig
from serl_chunk.robots.base import RobotEnv
from serl_chunk.robots.mujoco_camera import MujocoCamera
from serl_chunk.types import IMAGE_PREFIX, STATE, CameraSpec, ConfigError, DataError, Observation, RobotSpec

CONTROL_HZ = 20.0
ACTIONS = 5  # moves of the gripper: x, y, z (up to 5 cm), yaw (0.3 rad), and of its opening; each in -1..1
CAMERA = "front"
GRIPPER = 4  # the action dimension of the opening
DATA = ("play", "noisy")  # which data the environment's data set consists of; the environment is the same
TASKS = 5


class Environment(NamedTuple):
    """What the environments of one name have in common."""

    state_dim: int
    max_episode_steps: int


ENVIRONMENTS = {
    "cube-single": Environment(28, 200),
    "cube-double": Environment(37, 500),
    "cube-triple": Environment(46, 1000),
    "cube-quadruple": Environment(55, 1000),
    "cube-octuple": Environment(91, 1500),
    "scene": Environment(40, 750),
    "puzzle-3x3": Environment(55, 500),
    "puzzle-4x4": Environment(83, 500),
    "puzzle-4x5": Environment(99, 1000),
    "puzzle-4x6": Environment(115, 1000),
}


def ogbench_spec(config: OgbenchConfig) -> RobotSpec:
    """What learner and actor share about an OGBench environment.

    Actions are `float32[5]` in -1..1, differences that no state measures (see `ACTIONS`). The state is OGBench's own
    observation: joints, gripper, objects. The specification's name holds the environment's, and its reward where that
    is dense, so that a learner refuses an actor that solves another task.

    Raises ConfigError for a name that is no single-task manipulation environment, listing the valid ones.
    """
    name = config.env_name
    if name not in _names():
        near = difflib.get_close_matches(name, _names(), 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"robot.env_name={name}: OGBench has no such single-task environment; {hint}valid: "
            f"ENV-{'|'.join(DATA)}-singletask-taskN-v0 with N from 1 to {TASKS} (the default task without -taskN) and "
            f"ENV one of {', '.join(ENVIRONMENTS)}"
        )
    environment = ENVIRONMENTS[next(e for e in ENVIRONMENTS if name.startswith(f"{e}-"))]
    return RobotSpec(
        name=name if config.reward == "sparse" else f"{name} with dense reward",
        control_hz=CONTROL_HZ,
        state_dim=environment.state_dim,
        action_low=(-1.0,) * ACTIONS,
        action_high=(1.0,) * ACTIONS,
        joint_of_action=(-1,) * ACTIONS,
        grippers=(GRIPPER,),
        cameras=(CameraSpec(CAMERA, config.image_size, config.image_size),),
        max_episode_steps=config.max_episode_steps or environment.max_episode_steps,
    )


def _names() -> list[str]:
    tasks = ["", *(f"-task{i}" for i in range(1, TASKS + 1))]
    return [f"{e}-{data}-singletask{task}-v0" for e in ENVIRONMENTS for data in DATA for task in tasks]


class OgbenchEnv(RobotEnv):
    """One task of cube, scene or puzzle, states only.

    `step` returns 1 and terminates where the task is solved. Before that it returns 0, or with `config.reward="dense"`
    1 minus the number of parts (cubes, buttons, drawer, window) that are not yet as the task wants them. It truncates
    after the specification's `max_episode_steps`. `info["missing"]` is that number.

    Start states are OGBench's own for a seed: `reset(seed=...)` reproduces them.

    Raises ConfigError where OGBench is not installed, is too old, or has no such environment.
    """

    def __init__(self, config: OgbenchConfig, *, images: str = "on_request") -> None:
        spec = ogbench_spec(config)
        self._set_spaces(spec, images)
        package = extras.ogbench(f"robot {config.kind}")
        try:
            env = package.make_env_and_datasets(
                config.env_name, env_only=True, success_timing="post", disable_env_checker=True
            )
        except TypeError as error:  # before 1.2 there is no success_timing
            raise ConfigError(
                f"robot {config.kind} cannot be made by this version of OGBench ({error}): "
                "pip install --upgrade 'serl-chunk[ogbench]'"
            ) from error
        # Without gymnasium's wrappers: the time limit is the specification's, and their checks cost as much as a step.
        self.simulation: Any = env.unwrapped
        self._dense = config.reward == "dense"
        self._camera: MujocoCamera | None = None
        self._tick = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict]:
        """A new start state of the task; `options` are not used."""
        super().reset(seed=seed)
        observation, _ = self.simulation.reset(seed=seed)
        # OGBench takes two unseeded random steps on the way, which leave MuJoCo's solver another place to start from.
        self.simulation.data.qacc_warmstart[:] = 0
        self._tick = 0
        return self._observe(observation), {"success": False}

    def step(self, action: np.ndarray) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """One tick (50 ms) with `action float32[5]`; values past -1..1 are clipped.

        Raises DataError for an action that is not 5 finite numbers, and where the simulation has diverged.
        """
        action = np.asarray(action, np.float32)
        if action.shape != self.action_space.shape or not np.isfinite(action).all():
            raise DataError(f"an action of {self.robot_spec.name} is 5 finite numbers, got {action}")
        executed = np.clip(action, -1, 1)
        observation, reward, success, _, _ = self.simulation.step(executed)
        self._tick += 1
        success = bool(success)
        missing = -round(float(reward))  # OGBench's reward, for a single task
        info = {"success": success, "missing": missing, "executed_action": executed}
        truncated = not success and self._tick >= self.robot_spec.max_episode_steps
        given = 1.0 - missing if self._dense else float(success)
        return self._observe(observation), given, success, truncated, info

    def read_images(self, cameras: Sequence[str] | None = None) -> Observation:
        """Render the camera: `{"images/front": uint8[image_size, image_size, 3]}`.

        Raises ConfigError for an unknown camera, or where no OpenGL context can be made.
        """
        frames = {}
        for name in [c.name for c in self.robot_spec.cameras] if cameras is None else cameras:
            size = self.robot_spec.camera(name).height
            if self._camera is None:
                self._camera = MujocoCamera(extras.mujoco(self.robot_spec.name, "ogbench"), self.simulation.model, size)
            frames[IMAGE_PREFIX + name] = self._camera.frame(self.simulation.data, name)
        return frames

    def close(self) -> None:
        """Free the simulation and the OpenGL context."""
        self.simulation.close()
        if self._camera is not None:
            self._camera.close()
            self._camera = None

    def _observe(self, values: np.ndarray) -> Observation:
        state = np.asarray(values, np.float32)
        if not np.isfinite(state).all():
            raise DataError(f"{self.robot_spec.name}: the simulation gave a state that is not finite, at {self._tick}")
        observation: Observation = {STATE: state}
        if self.images == "always":
            observation.update(self.read_images())
        return observation

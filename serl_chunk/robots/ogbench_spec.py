"""The specifications of OGBench's single-task manipulation environments, readable without the simulator.

A test compares every row with the environment itself.
"""

from __future__ import annotations

import difflib
from typing import NamedTuple

from serl_chunk.config.robots import OgbenchConfig
from serl_chunk.types import CameraSpec, ConfigError, RobotSpec

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

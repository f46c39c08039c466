"""The specifications of robomimic's tasks with low-dimensional observations, readable without the simulator.

A test compares every row with the environment itself, where robosuite is installed.
"""

from __future__ import annotations

from typing import NamedTuple

from serl_chunk.config.robots import RobomimicConfig
from serl_chunk.types import CameraSpec, RobotSpec

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

"""The specification of gym-aloha's two tasks: constants of their models, readable without the simulator.

A test compares every constant with the model itself.
"""

from __future__ import annotations

from serl_chunk.config.robots import AlohaSimConfig
from serl_chunk.robots.aloha_sim_scene import SCENES
from serl_chunk.types import CameraSpec, ConfigError, RobotSpec

CONTROL_HZ = 50.0
JOINTS = 14  # two arms of six joints and a gripper each
OBJECT_POSE = 7  # position (m) and quaternion (w, x, y, z)

ARM_LOW = (-3.14158, -1.85005, -1.76278, -3.14158, -1.8675, -3.14158)  # rad, from the model's actuators
ARM_HIGH = (3.14158, 1.25664, 1.6057, 3.14158, 2.23402, 3.14158)
CAMERAS = ("left_pillar", "right_pillar", "top", "angle", "front_close", "left_wrist", "right_wrist")


def aloha_sim_spec(config: AlohaSimConfig) -> RobotSpec:
    """What learner and actor share about `aloha_sim`.

    Actions are `float32[14]`: left arm (6 absolute joint positions, rad), left gripper (0 closed .. 1 open), the
    same for the right arm. gym-aloha itself declares -1..1 for all of them, which cannot even hold its start
    pose. The state is the measured joints in the same order and units, then the objects' poses (the cube; or peg and
    socket) if `config.cube_in_state`. The model's fingers move between about 0.06 and 0.97 of the gripper's range only;
    the range stays 0..1 because gym-aloha's data use it.

    Raises ConfigError for a camera the model does not have, or one named twice.
    """
    unknown = [name for name in config.cameras if name not in CAMERAS]
    if unknown:
        raise ConfigError(f"robot.cameras: aloha_sim has no camera {unknown[0]!r}; it has: {', '.join(CAMERAS)}")
    if len(set(config.cameras)) != len(config.cameras):
        raise ConfigError(f"robot.cameras names a camera twice: {', '.join(config.cameras)}")
    low, high = (*ARM_LOW, 0.0), (*ARM_HIGH, 1.0)
    objects = len(SCENES[config.env_name].starts)
    return RobotSpec(
        name=config.kind if config.env_name == "transfer_cube" else f"{config.kind} {config.env_name}",
        control_hz=CONTROL_HZ,
        state_dim=JOINTS + (objects * OBJECT_POSE if config.cube_in_state else 0),
        action_low=low * 2,
        action_high=high * 2,
        joint_of_action=tuple(range(JOINTS)),
        grippers=(6, 13),
        cameras=tuple(CameraSpec(name, config.image_size, config.image_size) for name in config.cameras),
        max_episode_steps=config.max_episode_steps,
        arms=((0, 7), (7, 14)),
    )

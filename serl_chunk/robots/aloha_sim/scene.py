"""gym-aloha's two scenes and their specifications: constants, readable without the simulator."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import NamedTuple

from serl_chunk.config.robots import AlohaSimConfig
from serl_chunk.types import CameraSpec, ConfigError, RobotSpec

CONTROL_HZ = 50.0
JOINTS = 14  # two arms of six joints and a gripper each
OBJECT_POSE = 7  # position (m) and quaternion (w, x, y, z)

ARM_LOW = (-3.14158, -1.85005, -1.76278, -3.14158, -1.8675, -3.14158)  # rad, from the model's actuators
ARM_HIGH = (3.14158, 1.25664, 1.6057, 3.14158, 2.23402, 3.14158)
CAMERAS = ("left_pillar", "right_pillar", "top", "angle", "front_close", "left_wrist", "right_wrist")


def aloha_sim_spec(config: AlohaSimConfig) -> RobotSpec:
    """Return the specification of `aloha_sim`.

    Actions are `float32[14]`: left arm (6 absolute joint positions, rad), left gripper (0 closed .. 1 open), the
    same for the right arm. gym-aloha itself declares -1..1 for all of them, which cannot even hold its start
    pose. The state is the measured joints in the same order and units, then the objects' poses (the cube; or peg and
    socket) if `config.cube_in_state`. The model's fingers move between about 0.06 and 0.97 of the gripper's range only;
    the range stays 0..1 because gym-aloha's data use it.

    Raises ConfigError for an unknown or repeated camera.
    """
    unknown = [name for name in config.cameras if name not in CAMERAS]
    if unknown:
        raise ConfigError(
            f"aloha_sim has no such camera ({unknown[0]}, expected {', '.join(CAMERAS)})", parameter="robot.cameras"
        )
    if len(set(config.cameras)) != len(config.cameras):
        raise ConfigError(f"a camera is named twice ({', '.join(config.cameras)})", parameter="robot.cameras")
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


Contacts = Set[frozenset[str]]  # pairs of geometries that touch, by name

SUCCESS_STAGE = 4
OBJECT_HEIGHT = 0.05  # m, of an object's centre at the start; it drops to the table

# gym-aloha looks at one finger of each hand only, and so its stages do.
_LEFT_FINGER = "vx300s_left/10_left_gripper_finger"
_RIGHT_FINGER = "vx300s_right/10_right_gripper_finger"
_CUBE, _PEG, _PIN, _TABLE = "red_box", "red_peg", "pin", "table"
_SOCKET = ("socket-1", "socket-2", "socket-3", "socket-4")


class Region(NamedTuple):
    """Start region of an object's centre: (x, y) in metres."""

    low: tuple[float, float]
    high: tuple[float, float]


class Scene(NamedTuple):
    """One task of gym-aloha. `stage` gives its reward 0..4 for the contacts there are."""

    model_file: str
    starts: tuple[Region, ...]  # one an object, in the order of the model's free joints
    geometries: frozenset[str]  # the objects' own: contacts among others decide nothing
    stage: Callable[[Contacts], int]


def transfer_cube_stage(contacts: Contacts) -> int:
    """1: the right finger touches the cube, 2: and it is off the table, 3: the left finger does, 4: and it is off.

    Neither monotone nor a sum (gym-aloha, TransferCubeTask.get_reward).
    """
    lifted = not _touch(contacts, _CUBE, _TABLE)
    if _touch(contacts, _CUBE, _LEFT_FINGER):
        return 4 if lifted else 3
    if _touch(contacts, _CUBE, _RIGHT_FINGER):
        return 2 if lifted else 1
    return 0


def insertion_stage(contacts: Contacts) -> int:
    """1: both hands touch their object, 2: and both are off the table, 3: peg and socket touch in the air, 4: the pin.

    The pin sits inside the socket, 2 cm from its mouth; the peg's touching it is the success, in the air or not
    (gym-aloha, InsertionTask.get_reward).
    """
    if _touch(contacts, _PEG, _PIN):
        return 4
    lifted = not _touch(contacts, _PEG, _TABLE) and not any(_touch(contacts, part, _TABLE) for part in _SOCKET)
    if lifted and any(_touch(contacts, _PEG, part) for part in _SOCKET):
        return 3
    held = any(_touch(contacts, part, _LEFT_FINGER) for part in _SOCKET) and _touch(contacts, _PEG, _RIGHT_FINGER)
    return (2 if lifted else 1) if held else 0


SCENES: dict[str, Scene] = {
    "transfer_cube": Scene(
        "bimanual_viperx_transfer_cube.xml",
        (Region((0.0, 0.4), (0.2, 0.6)),),
        frozenset({_CUBE}),
        transfer_cube_stage,
    ),
    "insertion": Scene(
        "bimanual_viperx_insertion.xml",
        (Region((0.1, 0.4), (0.2, 0.6)), Region((-0.2, 0.4), (-0.1, 0.6))),  # peg, socket
        frozenset({_PEG, _PIN, *_SOCKET}),
        insertion_stage,
    ),
}


def _touch(contacts: Contacts, a: str, b: str) -> bool:
    return frozenset((a, b)) in contacts

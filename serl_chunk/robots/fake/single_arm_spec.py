"""What the fake single-arm task is: its specification and its geometry. Imports no gymnasium."""

from __future__ import annotations

from serl_chunk.config.robots import FakeSingleArmConfig
from serl_chunk.types import CameraSpec, RobotSpec

CAMERAS = ("side", "wrist")
ACTION_DIM = 7  # linear velocity, angular velocity, gripper velocity
GRIPPER = 6
HAND_DIM = 10  # opening, position, the hand's forward and finger axes
STATE_DIM = HAND_DIM + 5  # and the block relative to the hand, and its yaw
POSITION_SCALE = 5.0  # of metres in the state, so that they vary about as much as unit vectors

LINEAR_SPEED = 0.3  # m/s at an action of 1
ANGULAR_SPEED = 1.5  # rad/s
GRIPPER_SPEED = 4.0  # openings/s

WORKSPACE_LOW, WORKSPACE_HIGH = (0.3, -0.25, 0.005), (0.7, 0.25, 0.35)  # m, of the grip point
MAX_TILT = 0.6  # rad of the hand from straight down; a turn past it is not made

FINGERS_CLOSED = 0.4  # fingers that cross this opening downwards grasp; above it they let go
FINGERS_ON_BLOCK = 0.3  # opening at which a held block stops the fingers

BLOCK_LENGTH, BLOCK_WIDTH = 0.08, 0.03  # m; the fingers close across the width
BLOCK_REST_Z = BLOCK_WIDTH / 2
BLOCK_START_LOW, BLOCK_START_HIGH = (0.38, -0.18), (0.58, 0.02)  # m, x and y of its centre
BLOCK_START_YAW = 1.0  # rad, uniform +-
PLACE = (0.5, 0.17, BLOCK_REST_Z)  # m, where the block must be released

HOME = (0.48, 0.0, 0.2)  # m, of the grip point, the hand straight down
START_NOISE = 0.02  # m, uniform +-, of the start's position
START_TURN_NOISE = 0.1  # rad, the same of the hand's turn about each axis


def fake_single_arm_spec(config: FakeSingleArmConfig) -> RobotSpec:
    """The robot's specification: 7 velocities in [-1, 1], two cameras, 15 state numbers.

    Without `config.observe_objects` the state is the hand's 10 numbers.
    """
    return RobotSpec(
        name=config.kind,
        control_hz=config.control_hz,
        state_dim=STATE_DIM if config.observe_objects else HAND_DIM,
        action_low=(-1.0,) * ACTION_DIM,
        action_high=(1.0,) * ACTION_DIM,
        joint_of_action=(-1,) * ACTION_DIM,
        # A push, as HIL-SERL's: repeated on a tick without an action, the fingers go on to where they were going.
        grippers=(6,),
        cameras=tuple(CameraSpec(name, config.image_size, config.image_size) for name in CAMERAS),
        max_episode_steps=config.max_episode_steps,
    )

"""Specification and geometry of the fake ALOHA task."""

from __future__ import annotations

from serl_chunk.config.robots import FakeAlohaConfig
from serl_chunk.robots.base import joints_spec
from serl_chunk.robots.fake.kinematics import JOINT_HIGH, JOINT_LOW, LEFT, RIGHT, Point, inverse
from serl_chunk.types import RobotSpec

CAMERAS = ("top", "left_wrist", "right_wrist")
ARM_DIM = 7  # six joints and a gripper
ACTION_DIM = 2 * ARM_DIM
GRIPPER = (6, 13)  # action and state index of each arm's gripper: 0 closed .. 1 open
STATE_DIM = ACTION_DIM + 9  # joints, cube, left grip point - cube, right grip point - cube
POSITION_SCALE = 5.0  # of metres in the state, so that they vary about as much as radians

JOINT_RATE = 0.06  # radians per tick
GRIPPER_RATE = 0.2  # per tick
RATES = [GRIPPER_RATE if i in GRIPPER else JOINT_RATE for i in range(ACTION_DIM)]  # whatever the tick lasts

FINGERS_CLOSED = 0.4  # fingers that cross this opening downwards grasp; a holding arm above it releases
FINGERS_ON_CUBE = 0.3  # opening at which a held cube stops the fingers
OWN_HALF_BAND = 0.05  # metres past the middle at which an arm may still grasp

CUBE_SIZE = 0.04  # metres, edge
CUBE_REST_Z = CUBE_SIZE / 2  # cube centre when it lies on the table
CUBE_START_LOW = (0.06, -0.15)  # x, y in metres: 15 x 30 cm in the right arm's half
CUBE_START_HIGH = (0.21, 0.15)
START_JOINT_NOISE = 0.05  # radians, uniform +-, every joint but the grippers
PLACE: Point = (-0.14, 0.06, CUBE_REST_Z)  # where the left arm must release the cube
PLACE_DISTANCE = 0.05  # m from it at which releasing counts

HOME_GRIP: tuple[Point, Point] = ((-0.18, 0.0, 0.18), (0.18, 0.0, 0.18))
HOME_JOINTS = (*inverse(LEFT, HOME_GRIP[LEFT]), 1.0, *inverse(RIGHT, HOME_GRIP[RIGHT]), 1.0)

ACTION_LOW = (*JOINT_LOW, 0.0, *JOINT_LOW, 0.0)
ACTION_HIGH = (*JOINT_HIGH, 1.0, *JOINT_HIGH, 1.0)


def fake_aloha_spec(config: FakeAlohaConfig) -> RobotSpec:
    """Return the specification: 14 joint targets (radians, gripper openings), 23 state numbers (14 without objects)."""
    state_dim = STATE_DIM if config.observe_objects else ACTION_DIM
    frames = CAMERAS, config.image_size, config.max_episode_steps
    return joints_spec("fake_aloha", config.control_hz, state_dim, JOINT_LOW, JOINT_HIGH, *frames)

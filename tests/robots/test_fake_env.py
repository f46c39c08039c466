"""The fake ALOHA task: what it shows, its motion, grasps, the hand-over and where a release counts."""

import math

import numpy as np
import pytest

from serl_chunk.config.loader import load_experiment
from serl_chunk.config.robots import FakeAlohaConfig
from serl_chunk.robots.fake import spec as task
from serl_chunk.robots.fake.env import NO_ARM, FakeAlohaEnv
from serl_chunk.robots.fake.expert import HAND_OVER
from serl_chunk.robots.fake.kinematics import BASE_X, LEFT, REACH, RIGHT, SHOULDER_Z, inverse
from serl_chunk.robots.registry import robot_spec

OPEN, CLOSED = 1.0, 0.0


def _at(env, *, cube, left=task.HOME_GRIP[LEFT], right=task.HOME_GRIP[RIGHT], openings=(OPEN, OPEN), holder=NO_ARM):
    """Start an episode with the grip points and the cube at given places, the cube centred in its holder's hand."""
    env.reset(seed=0)
    joints = (*inverse(LEFT, left), openings[LEFT], *inverse(RIGHT, right), openings[RIGHT])
    env.place(joints, cube, holder)


def _drive(env, ticks, *, left=None, right=None, openings=(None, None)):
    """Send both arms to grip points (None: stay) and openings for some ticks; the last step's result."""
    for _ in range(ticks):
        command = list(env.joints)
        for arm, target in ((LEFT, left), (RIGHT, right)):
            if target is not None:
                command[arm * 7 : arm * 7 + 6] = inverse(arm, target)
            if openings[arm] is not None:
                command[task.GRIPPER[arm]] = openings[arm]
        result = env.step(np.array(command, np.float32))
    return result


@pytest.fixture
def env():
    return FakeAlohaEnv(FakeAlohaConfig())


def test_cubes_begin_all_over_their_region(env):
    cubes = np.array([env.reset(seed=s) and env.cube for s in range(300)])
    assert np.all(cubes[:, :2] >= task.CUBE_START_LOW)
    assert np.all(cubes[:, :2] <= task.CUBE_START_HIGH)
    np.testing.assert_allclose(np.ptp(cubes[:, :2], axis=0), (0.15, 0.30), rtol=0.05)


def test_state_is_joints_cube_and_relative_grip_points_and_tells_no_time(env):
    observation, _ = env.reset(seed=1)
    cube, (left, right) = np.array(env.cube), np.array(env.grips)
    expected = np.concatenate([env.joints, 5 * cube, 5 * (left - cube), 5 * (right - cube)])
    np.testing.assert_allclose(observation["state"], expected, rtol=1e-5, atol=1e-6)
    for _ in range(10):
        np.testing.assert_array_equal(env.step(np.array(env.joints))[0]["state"], observation["state"])


def test_commands_are_clipped_and_rate_limited_and_reported(env):
    env.reset(seed=0)
    before = np.array(env.joints)
    observation, _, _, _, info = env.step(np.full(14, 100.0, np.float32))
    moved = np.where(np.isin(np.arange(14), task.GRIPPER), 0.0, 0.06)  # the grippers were open already
    np.testing.assert_allclose(info["executed_action"], before + moved, rtol=1e-6)
    np.testing.assert_array_equal(info["executed_action"], observation["state"][:14])
    assert info["executed_action"].dtype == np.float32
    small = np.array(env.joints, np.float32) + np.float32(0.01)
    small[list(task.GRIPPER)] = 0.9
    np.testing.assert_allclose(env.step(small)[4]["executed_action"], small, rtol=1e-6)


@pytest.mark.parametrize(("distance", "held"), [(0.0, True), (0.024, True), (0.026, False)])
def test_closing_fingers_hold_a_cube_within_the_tolerance_and_carry_it(distance, held):
    env = FakeAlohaEnv(FakeAlohaConfig(grasp_tolerance=0.025))
    _at(env, cube=(0.15, 0.05, 0.02), right=(0.15 + distance, 0.05, 0.02))
    *_, info = _drive(env, 5, openings=(None, CLOSED))
    assert (env.holder == RIGHT) == held
    assert env.joints[task.GRIPPER[RIGHT]] == pytest.approx(task.FINGERS_ON_CUBE if held else CLOSED)
    assert info["executed_action"][task.GRIPPER[RIGHT]] < 0.2  # the squeeze stays in the record
    _drive(env, 10, right=(0.12, 0.0, 0.12))
    assert (env.cube[2] > 0.09) == held
    if not distance:
        np.testing.assert_allclose(env.cube, env.grips[RIGHT], atol=1e-6)


def test_closed_fingers_that_come_to_the_cube_do_not_hold_it(env):
    cube = (0.15, 0.05, 0.02)
    _at(env, cube=cube, right=(0.15, 0.05, 0.1), openings=(OPEN, CLOSED))
    _drive(env, 10, right=cube, openings=(None, CLOSED))
    assert math.dist(env.grips[RIGHT], cube) < 0.005
    assert env.holder == NO_ARM
    assert env.joints[task.GRIPPER[RIGHT]] == CLOSED
    _drive(env, 3, openings=(None, OPEN))
    _drive(env, 3, openings=(None, CLOSED))
    assert env.holder == RIGHT  # having opened, they can


@pytest.mark.parametrize(
    ("arm", "x", "held"), [(LEFT, 0.04, True), (LEFT, 0.06, False), (RIGHT, -0.04, True), (RIGHT, -0.06, False)]
)
def test_an_arm_grasps_in_its_own_half_and_a_narrow_band(env, arm, x, held):
    cube = (x, 0.0, 0.1)
    _at(env, cube=cube, **{"left" if arm == LEFT else "right": cube})
    _drive(env, 5, openings=(CLOSED, None) if arm == LEFT else (None, CLOSED))
    assert math.dist(env.grips[arm], cube) < 0.001
    assert (env.holder == arm) == held
    assert abs(HAND_OVER[0]) < task.OWN_HALF_BAND, "where both may"


def test_only_the_left_arm_places(env):
    """The right arm at full stretch may come within the tolerance; it does not spare the hand-over."""
    assert math.dist((BASE_X[RIGHT], 0.0, SHOULDER_Z), task.PLACE) > REACH
    _at(env, cube=task.PLACE, openings=(OPEN, 0.3), holder=RIGHT)
    offset = tuple(p - g for p, g in zip(task.PLACE, env.grips[RIGHT], strict=True))
    env.place(env.joints, env.cube, RIGHT, offset)
    _, reward, terminated, _, _ = _drive(env, 1, openings=(None, OPEN))
    assert env.holder == NO_ARM
    assert math.dist(env.cube, task.PLACE) < task.PLACE_DISTANCE
    assert (reward, terminated) == (0.0, False)


def test_hand_over(env):
    middle = (0.01, 0.0, 0.12)
    _at(env, cube=middle, right=middle, left=middle, openings=(OPEN, 0.3), holder=RIGHT)
    _drive(env, 5, openings=(CLOSED, CLOSED))
    assert env.holder == LEFT
    assert env.joints[task.GRIPPER[RIGHT]] == task.FINGERS_ON_CUBE  # the cube is still between its fingers
    _drive(env, 8, left=(-0.1, 0.0, 0.12), openings=(CLOSED, OPEN))
    np.testing.assert_allclose(env.cube, env.grips[LEFT], atol=1e-6)


def test_a_dropped_cube_falls_and_can_be_grasped_again(env):
    start = (0.15, 0.0, 0.1)
    _at(env, cube=start, right=start, openings=(OPEN, 0.3), holder=RIGHT)
    _drive(env, 1, openings=(None, OPEN))
    assert env.holder == NO_ARM
    np.testing.assert_allclose(env.cube, (0.15, 0.0, task.CUBE_REST_Z), atol=1e-6)
    _drive(env, 10, right=env.cube, openings=(None, OPEN))
    _drive(env, 5, openings=(None, CLOSED))
    assert env.holder == RIGHT


@pytest.mark.parametrize(
    ("shift", "success"),
    [((0.045, 0.0, 0.0), True), ((-0.055, 0.0, 0.0), False), ((0, 0.045, 0), True), ((0, 0, 0.1), False)],
)
def test_release_counts_within_the_place_tolerance(env, shift, success):
    spot = tuple(p + s for p, s in zip(task.PLACE, shift, strict=True))
    _at(env, cube=spot, left=spot, openings=(0.3, OPEN), holder=LEFT)
    _, reward, terminated, _, info = _drive(env, 3, openings=(CLOSED, None))
    assert (reward, terminated, info["success"]) == (0.0, False, False)  # being there is not enough
    _, reward, terminated, truncated, info = _drive(env, 1, openings=(OPEN, None))
    assert (reward, terminated, truncated, info["success"]) == (float(success), success, False, success)


def test_without_objects_the_state_is_the_joints_and_the_cube_shows_in_the_pictures_alone():
    seen, blind = (FakeAlohaEnv(FakeAlohaConfig(observe_objects=o)) for o in (True, False))
    both = [e.reset(seed=3)[0]["state"] for e in (seen, blind)]
    np.testing.assert_array_equal(both[1], both[0][:14])
    assert blind.observation_space["state"].shape == (14,)
    assert robot_spec(blind.config).digest() != robot_spec(seen.config).digest()
    frame = blind.read_images(["top"])["images/top"]
    blind.place(blind.joints, (0.1, -0.1, task.CUBE_REST_Z))
    assert not np.array_equal(blind.read_images(["top"])["images/top"], frame)
    config = load_experiment("fake_aloha_images")
    spec = robot_spec(config.robot)
    assert config.agent.image_keys == tuple(c.name for c in spec.cameras) == task.CAMERAS
    assert spec.state_dim == 14

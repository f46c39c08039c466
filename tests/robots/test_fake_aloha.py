"""The fake ALOHA task: what it shows, its motion, grasps, where a release counts, its pictures and demonstrator."""

from __future__ import annotations

import contextlib
import math
import time

import numpy as np
import pytest
from demonstrations import finish
from robot_served import HERE, served, wait
from robot_world import FaultyArms

from serl_chunk.config.robots import FakeAlohaConfig
from serl_chunk.robots.drawn_camera import FakeAlohaCamera
from serl_chunk.robots.fake import spec as task
from serl_chunk.robots.fake.env import NO_ARM, FakeAlohaEnv
from serl_chunk.robots.fake.kinematics import BASE_X, LEFT, REACH, RIGHT, SHOULDER_Z, inverse
from serl_chunk.robots.fake.render import render

OPEN, CLOSED = 1.0, 0.0
CUBE = (0.15, 0.1, task.CUBE_REST_Z)


def place(env, cube, *, left=task.HOME_GRIP[LEFT], right=task.HOME_GRIP[RIGHT], openings=(OPEN, OPEN), holder=NO_ARM):
    """Start an episode with the grip points and the cube at given places, the cube centred in its holder's hand."""
    env.reset(seed=0)
    joints = (*inverse(LEFT, left), openings[LEFT], *inverse(RIGHT, right), openings[RIGHT])
    env.place(joints, cube, holder)


def drive(env, ticks, *, right=None, openings=(None, None)):
    """Send the right arm to a grip point (None: stay) and openings for some ticks; the last step's result."""
    for _ in range(ticks):
        command = list(env.joints)
        if right is not None:
            command[7:13] = inverse(RIGHT, right)
        for arm, opening in enumerate(openings):
            if opening is not None:
                command[task.GRIPPER[arm]] = opening
        result = env.step(np.array(command, np.float32))
    return result


@pytest.fixture
def env():
    return FakeAlohaEnv(FakeAlohaConfig())


def test_state_is_joints_cube_and_relative_grip_points_and_tells_no_time(env):
    observation, _ = env.reset(seed=1)
    cube, (left, right) = np.array(env.cube), np.array(env.grips)
    expected = np.concatenate([env.joints, 5 * cube, 5 * (left - cube), 5 * (right - cube)])
    np.testing.assert_allclose(observation["state"], expected, rtol=1e-5, atol=1e-6)
    cubes = np.array([env.reset(seed=s) and env.cube for s in range(300)])[:, :2]
    np.testing.assert_allclose(cubes.min(axis=0), (0.06, -0.15), atol=0.01)
    np.testing.assert_allclose(cubes.max(axis=0), (0.21, 0.15), atol=0.01)
    observation, _ = env.reset(seed=1)
    for _ in range(10):
        np.testing.assert_array_equal(env.step(np.array(env.joints))[0]["state"], observation["state"])


@pytest.mark.parametrize(("distance", "held"), [(0.0, True), (0.024, True), (0.026, False)])
def test_closing_fingers_hold_a_cube_within_the_tolerance_and_carry_it(distance, held):
    env = FakeAlohaEnv(FakeAlohaConfig(grasp_tolerance=0.025))
    place(env, (0.15, 0.05, 0.02), right=(0.15 + distance, 0.05, 0.02))
    *_, info = drive(env, 5, openings=(None, CLOSED))
    assert (env.holder == RIGHT) == held
    assert env.joints[task.GRIPPER[RIGHT]] == pytest.approx(task.FINGERS_ON_CUBE if held else CLOSED)
    assert info["executed_action"][task.GRIPPER[RIGHT]] < 0.2  # the squeeze stays in the record
    drive(env, 10, right=(0.12, 0.0, 0.12))
    assert (env.cube[2] > 0.09) == held
    if not distance:
        np.testing.assert_allclose(env.cube, env.grips[RIGHT], atol=1e-6)


def test_a_dropped_cube_falls_and_the_right_arm_places_none(env):
    """At full stretch it may come within the tolerance; it does not spare the hand-over."""
    start = (0.15, 0.0, 0.1)
    place(env, start, right=start, openings=(OPEN, 0.3), holder=RIGHT)
    drive(env, 1, openings=(None, OPEN))
    assert env.holder == NO_ARM
    np.testing.assert_allclose(env.cube, (0.15, 0.0, task.CUBE_REST_Z), atol=1e-6)
    assert math.dist((BASE_X[RIGHT], 0.0, SHOULDER_Z), task.PLACE) > REACH
    place(env, task.PLACE, openings=(OPEN, 0.3), holder=RIGHT)
    env.place(env.joints, env.cube, RIGHT, tuple(np.subtract(task.PLACE, env.grips[RIGHT])))
    _, reward, terminated, _, _ = drive(env, 1, openings=(None, OPEN))
    assert env.holder == NO_ARM
    assert math.dist(env.cube, task.PLACE) < task.PLACE_DISTANCE
    assert (reward, terminated) == (0.0, False)


@pytest.mark.parametrize(
    ("shift", "success"), [((0.045, 0, 0), True), ((-0.055, 0, 0), False), ((0, 0.045, 0), True), ((0, 0, 0.1), False)]
)
def test_release_counts_within_the_place_tolerance(env, shift, success):
    spot = tuple(p + s for p, s in zip(task.PLACE, shift, strict=True))
    place(env, spot, left=spot, openings=(0.3, OPEN), holder=LEFT)
    _, reward, terminated, _, info = drive(env, 3, openings=(CLOSED, None))
    assert (reward, terminated, info["success"]) == (0.0, False, False)  # being there is not enough
    _, reward, terminated, truncated, info = drive(env, 1, openings=(OPEN, None))
    assert (reward, terminated, truncated, info["success"]) == (float(success), success, False, success)


@pytest.mark.parametrize("holder", [LEFT, RIGHT, NO_ARM])
def test_the_demonstrator_takes_over_an_arm_that_holds_the_cube_and_reopens_a_fist_around_it(env, holder):
    env.reset(seed=3)
    joints = list(env.joints)
    if holder == NO_ARM:  # a missed grasp
        joints[task.GRIPPER[RIGHT]] = 0.0
        joints[7:13] = inverse(RIGHT, env.cube)
        env.place(joints, env.cube)
        assert env.make_expert().act()[task.GRIPPER[RIGHT]] > 0.1
    else:
        joints[task.GRIPPER[holder]] = task.FINGERS_ON_CUBE
        env.place(joints, env.grips[holder], holder)
    assert finish(env, env.make_expert(), 120) is not None
    for x, y in ((-0.3, 0.2), (0.3, -0.2)):  # and fetches a cube dropped anywhere within reach
        env.reset(seed=1)
        env.place(env.joints, (x, y, task.CUBE_REST_Z))
        assert finish(env, env.make_expert(), 120) is not None


class Aloha(FaultyArms):
    """Arms with a cube."""

    holder = -1.0

    def read(self):
        return super().read()._replace(extra={"cube": np.array(CUBE), "holder": np.array([self.holder])})


@contextlib.contextmanager
def opened(robot, **more):
    """A camera of a robot that was measured."""
    camera = FakeAlohaCamera("top", server=f"{HERE}:{robot.port}", **more)
    camera.open(time.monotonic)
    try:
        client = robot.client("a", "any")
        wait(lambda: client.next_state()["q"] is not None)
        yield camera
    finally:
        camera.close()


def test_a_served_camera_draws_the_measured_joints_and_the_cube():
    arms = Aloha()
    with served(arms=arms) as robot, opened(robot, size=32, rate=100.0) as camera:
        assert camera.spec() == (32, 32, False)
        frames = [camera.read() for _ in range(3)]
        q = arms.q.tolist()
        assert np.array_equal(frames[-1].image, render("top", 32, q, CUBE, False))
        assert [f.number for f in frames] == [1, 2, 3]
        assert frames[0].stamp < frames[1].stamp < frames[2].stamp < time.monotonic()
        arms.holder = 1.0
        wait(lambda: np.array_equal(camera.read().image, render("top", 32, q, CUBE, True)))

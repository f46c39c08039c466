"""The fake ALOHA's demonstrator in states that it seldom meets."""

import numpy as np
import pytest
from demonstrations import finish

from serl_chunk.config.robots import FakeAlohaConfig
from serl_chunk.robots.fake import spec as task
from serl_chunk.robots.fake.env import NO_ARM, FakeAlohaEnv
from serl_chunk.robots.fake.expert import ScriptedExpert
from serl_chunk.robots.fake.kinematics import LEFT, RIGHT, inverse


@pytest.fixture
def env():
    env = FakeAlohaEnv(FakeAlohaConfig())
    env.reset(seed=3)
    return env


def test_it_decides_from_the_state_alone(env):
    """Two experts without noise agree in one state, whatever each has seen before."""
    veteran = ScriptedExpert(env, speed=(1.0, 1.0), noise=0.0)
    while env.holder != LEFT:
        env.step(veteran.act())
    np.testing.assert_array_equal(veteran.act(), ScriptedExpert(env, speed=(1.0, 1.0), noise=0.0).act())


@pytest.mark.parametrize("holder", [LEFT, RIGHT, NO_ARM])
def test_it_takes_over_an_arm_that_holds_the_cube_and_reopens_a_fist_around_it(env, holder):
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


def test_it_fetches_a_cube_dropped_anywhere_within_reach(env):
    finished = 0
    for i, (x, y) in enumerate(np.random.default_rng(0).uniform((-0.3, -0.2), (0.3, 0.2), (60, 2)).tolist()):
        env.reset(seed=i)
        env.place(env.joints, (x, y, task.CUBE_REST_Z))
        expert = env.make_expert()
        expert.reset(i)
        finished += finish(env, expert, 120) is not None
    assert finished >= 58

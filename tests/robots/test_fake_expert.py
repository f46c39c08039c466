import numpy as np
import pytest

from serl_chunk.config.robots import FakeAlohaConfig
from serl_chunk.robots.fake import spec as task
from serl_chunk.robots.fake.env import FakeAlohaEnv
from serl_chunk.robots.fake.expert import HAND_OVER, ScriptedExpert
from serl_chunk.robots.fake.kinematics import LEFT, RIGHT, inverse
from serl_chunk.robots.registry import make_expert


def _finish(env, expert, limit=120):
    """Act to the end; the episode's ticks, or None without success."""
    for _ in range(limit):
        _, _, terminated, truncated, _ = env.step(expert.act())
        if terminated or truncated:
            break
    return env.tick if terminated else None


@pytest.fixture
def env():
    return FakeAlohaEnv(FakeAlohaConfig())


def test_it_succeeds_on_at_least_95_of_100_seeds_with_time_to_spare(env):
    expert = make_expert(env)
    lengths = []
    for seed in range(100):
        env.reset(seed=seed)
        expert.reset(seed)
        lengths.append(_finish(env, expert))
    successes = [n for n in lengths if n is not None]
    assert len(successes) >= 95
    assert 41 <= np.mean(successes) <= 50
    assert max(successes) < 110


def test_commands_are_valid_and_reproducible(env):
    rollouts = []
    for _ in range(2):
        env.reset(seed=1)
        expert = env.make_expert()
        expert.reset(7)
        actions = []
        for _ in range(30):
            actions.append(expert.act())
            assert env.action_space.contains(actions[-1])
            env.step(actions[-1])
        rollouts.append(np.array(actions))
    np.testing.assert_array_equal(rollouts[0], rollouts[1])


def test_seeds_vary_speed_and_noise(env):
    env.reset(seed=1)
    expert = env.make_expert()
    actions = []
    for seed in (0, 1):
        expert.reset(seed)
        actions.append(expert.act())
    assert not np.allclose(*actions, atol=1e-3)


def test_it_decides_from_the_state_alone(env):
    """Two experts without noise agree in one state, whatever each has seen before."""
    veteran = ScriptedExpert(env, speed=(1.0, 1.0), noise=0.0)
    env.reset(seed=3)
    while env.holder != LEFT:
        env.step(veteran.act())
    np.testing.assert_array_equal(veteran.act(), ScriptedExpert(env, speed=(1.0, 1.0), noise=0.0).act())


def test_it_reopens_after_a_missed_grasp(env):
    env.reset(seed=2)
    joints = list(env.joints)
    joints[task.GRIPPER[RIGHT]] = 0.0
    joints[7:13] = inverse(RIGHT, env.cube)
    env.place(joints, env.cube)
    expert = env.make_expert()
    assert expert.act()[task.GRIPPER[RIGHT]] > 0.1
    assert _finish(env, expert) is not None


@pytest.mark.parametrize("holder", [LEFT, RIGHT])
def test_it_takes_over_an_arm_that_holds_the_cube(env, holder):
    env.reset(seed=2)
    joints = list(env.joints)
    joints[task.GRIPPER[holder]] = task.FINGERS_ON_CUBE
    env.place(joints, env.grips[holder], holder)
    assert _finish(env, env.make_expert()) is not None


def test_it_fetches_a_cube_dropped_anywhere_within_reach(env):
    finished = 0
    for i, (x, y) in enumerate(np.random.default_rng(0).uniform((-0.3, -0.2), (0.3, 0.2), (60, 2)).tolist()):
        env.reset(seed=i)
        env.place(env.joints, (x, y, task.CUBE_REST_Z))
        expert = env.make_expert()
        expert.reset(i)
        finished += _finish(env, expert) is not None
    assert finished >= 58


def test_it_can_hand_over_where_both_arms_may_grasp():
    assert abs(HAND_OVER[0]) < task.OWN_HALF_BAND

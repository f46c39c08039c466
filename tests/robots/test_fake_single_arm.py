"""The fake single arm: motion and its limits, grasping, placing, pictures, demonstrator."""

import numpy as np
import pytest
from demonstrations import begin_of, helped, started

from serl_chunk.config.robots import FakeSingleArmConfig
from serl_chunk.devices.registry import make_intervention
from serl_chunk.robots.fake import single_arm as task
from serl_chunk.robots.fake.single_arm import DOWN, STALL_TICKS, FakeSingleArmEnv

OPEN, CLOSE = np.eye(7)[6], -np.eye(7)[6]


@pytest.fixture
def env():
    return FakeSingleArmEnv(FakeSingleArmConfig())


def start_at(env, position, *, block=(0.5, 0.0, task.BLOCK_REST_Z), yaw=0.0, **fields):
    env.reset(seed=0)
    env.position, env.rotation = np.array(position, float), DOWN.copy()
    env.block, env.yaw = np.array(block, float), yaw
    for name, value in fields.items():
        setattr(env, name, value)


def repeat(env, action, ticks):
    for _ in range(ticks):
        result = env.step(action)
    return result


@pytest.mark.parametrize(
    ("beside", "yaw", "held"),
    [(0.019, 0.0, True), (0.021, 0.0, False), (0.0, 0.39, True), (0.0, 0.41, False), (0.0, np.pi - 0.1, True)],
)
def test_closing_fingers_hold_what_they_are_around(env, beside, yaw, held):
    start_at(env, (0.5 + beside, 0.0, task.BLOCK_REST_Z), yaw=yaw)
    repeat(env, CLOSE, 3)
    assert env.held == held
    assert env.opening == pytest.approx(task.FINGERS_ON_BLOCK if held else 0.0)


@pytest.mark.parametrize(("shift", "success"), [((0.03, 0, 0), True), ((0.05, 0, 0), False), ((0, 0, 0.1), False)])
def test_releasing_at_the_place_is_the_success(env, shift, success):
    spot = np.add(task.PLACE, shift)
    start_at(env, spot, block=spot, held=True, opening=0.3, offset=np.zeros(3))
    assert env.step(np.zeros(7))[1:3] == (0.0, False)  # being there is not enough
    _, reward, terminated, truncated, info = env.step(OPEN)
    assert (reward, terminated, truncated, info["success"]) == (float(success), success, False, success)
    assert env.block[2] == task.BLOCK_REST_Z


def test_the_scripted_human_frees_a_policy_that_does_nothing(env):
    human = make_intervention("scripted", env)
    started(env, human, 3)
    commands, solved = helped(env, human, lambda: np.zeros(7), 300, every=4)
    assert solved
    assert begin_of(commands) >= STALL_TICKS - 1
    assert None in commands[STALL_TICKS:], "it hands back"
    human.close()

"""The fake single arm: motion and its limits, grasping, placing, pictures, demonstrator."""

import numpy as np
import pytest
from demonstrations import begin_of, helped, started

from serl_chunk.config.robots import FakeSingleArmConfig
from serl_chunk.devices.registry import make_intervention
from serl_chunk.robots.fake import single_arm as task
from serl_chunk.robots.fake.single_arm import DOWN, STALL_TICKS, FakeSingleArmEnv
from serl_chunk.robots.registry import make_env, make_expert

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


def test_velocities_move_and_turn_the_hand_within_its_workspace(env):
    start_at(env, (0.5, 0.0, 0.2))
    env.step(np.array([1, -0.5, 0.5, 0, 0, 0, 0]))
    np.testing.assert_allclose(env.position, (0.53, -0.015, 0.215))
    env.step(np.array([0, 0, 0, 0, 0, 1, -1]))
    assert (env.hand_yaw, env.opening) == (pytest.approx(0.15), pytest.approx(0.6))
    before = env.step(np.zeros(7))[0]["state"]
    np.testing.assert_array_equal(env.step(np.zeros(7))[0]["state"], before)
    repeat(env, np.array([1, 1, 1, 1, 0, 0, 0]), 60)
    np.testing.assert_allclose(env.position, task.WORKSPACE_HIGH)
    assert np.arccos(-env.rotation[2, 2]) <= task.MAX_TILT + 1e-9
    for action in np.random.default_rng(0).uniform(-1, 1, (80, 7)):
        env.step(action)
    np.testing.assert_allclose(env.rotation @ env.rotation.T, np.eye(3), atol=1e-9)


@pytest.mark.parametrize(
    ("beside", "yaw", "held"),
    [(0.019, 0.0, True), (0.021, 0.0, False), (0.0, 0.39, True), (0.0, 0.41, False), (0.0, np.pi - 0.1, True)],
)
def test_closing_fingers_hold_what_they_are_around(env, beside, yaw, held):
    start_at(env, (0.5 + beside, 0.0, task.BLOCK_REST_Z), yaw=yaw)
    repeat(env, CLOSE, 3)
    assert env.held == held
    assert env.opening == pytest.approx(task.FINGERS_ON_BLOCK if held else 0.0)


def test_the_block_moves_and_turns_with_the_hand_and_a_fist_holds_nothing(env):
    start_at(env, (0.51, 0.0, task.BLOCK_REST_Z), yaw=0.2)
    repeat(env, CLOSE, 2)
    relative = env.rotation.T @ (env.block - env.position)
    repeat(env, np.array([0, 1, 1, 0, 0, 0.5, -1]), 4)
    np.testing.assert_allclose(env.rotation.T @ (env.block - env.position), relative, atol=1e-9)
    assert env.yaw == pytest.approx(0.2 + 4 * 0.075)
    start_at(env, (0.5, 0.0, 0.1), opening=0.0, held=False)
    repeat(env, np.array([0, 0, -1, 0, 0, 0, -1]), 4)
    assert not env.held


@pytest.mark.parametrize(("shift", "success"), [((0.03, 0, 0), True), ((0.05, 0, 0), False), ((0, 0, 0.1), False)])
def test_releasing_at_the_place_is_the_success(env, shift, success):
    spot = np.add(task.PLACE, shift)
    start_at(env, spot, block=spot, held=True, opening=0.3, offset=np.zeros(3))
    assert env.step(np.zeros(7))[1:3] == (0.0, False)  # being there is not enough
    _, reward, terminated, truncated, info = env.step(OPEN)
    assert (reward, terminated, truncated, info["success"]) == (float(success), success, False, success)
    assert env.block[2] == task.BLOCK_REST_Z


def test_blocks_begin_in_their_region_and_can_be_left_out_of_the_state(env):
    blocks = np.array([env.reset() and env.block for _ in range(200)])[:, :2]
    assert (blocks >= task.BLOCK_START_LOW).all()
    assert (blocks <= task.BLOCK_START_HIGH).all()
    assert np.ptp(blocks, axis=0).min() > 0.05
    blind = make_env(FakeSingleArmConfig(observe_objects=False))
    assert blind.robot_spec.state_dim == task.HAND_DIM
    seen, unseen = (each.reset(seed=3)[0]["state"] for each in (env, blind))
    np.testing.assert_array_equal(unseen, seen[: task.HAND_DIM])


def test_both_cameras_see_the_block_move_and_the_side_one_the_place(env):
    for camera in task.CAMERAS:
        columns = []
        for y in (-0.05, 0.05):
            start_at(env, (0.5, 0.0, 0.2), block=(0.5, y, task.BLOCK_REST_Z))
            frame = env.read_images([camera])[f"images/{camera}"]
            columns.append(np.nonzero((frame == (210, 40, 40)).all(axis=-1))[1].mean())
        assert abs(columns[0] - columns[1]) > 5
    assert (env.read_images(["side"])["images/side"] == (40, 90, 220)).all(axis=-1).sum() > 5


def test_the_demonstrator_recovers_from_a_fist_and_a_drop_and_stands_still_without_noise(env):
    expert = make_expert(env)
    start_at(env, (0.5, 0.0, task.BLOCK_REST_Z), yaw=1.2, opening=0.0)
    assert any(env.step(OPEN if env.held and tick < 25 else expert.act())[2] for tick in range(69))
    env.reset(seed=0)
    expert = make_expert(env)
    expert.noise = 0.0
    assert np.ptp(np.stack([expert.act() for _ in range(20)]), axis=0).max() == 0.0


def test_the_scripted_human_frees_a_policy_that_does_nothing(env):
    human = make_intervention("scripted", env)
    started(env, human, 3)
    commands, solved = helped(env, human, lambda: np.zeros(7), 300, every=4)
    assert solved
    assert begin_of(commands) >= STALL_TICKS - 1
    assert None in commands[STALL_TICKS:], "it hands back"
    human.close()

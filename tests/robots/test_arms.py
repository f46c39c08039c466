"""Kinematics of the built-in arms are those of their simulators, and the fake arms' inverse leads where it is asked."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from actor_helpers import LineEnv

from serl_chunk.config.robots import AlohaConfig, AlohaSimConfig, FakeAlohaConfig, FakeSingleArmConfig, GymConfig
from serl_chunk.robots.arms import aloha_arms, fake_aloha_arms, kinematics_of
from serl_chunk.robots.fake import kinematics as fake
from serl_chunk.robots.registry import make_env

SIDES = (fake.LEFT, fake.RIGHT)


@pytest.mark.parametrize(
    ("config", "arms"),
    [(FakeAlohaConfig(), fake_aloha_arms), (AlohaSimConfig(), aloha_arms),
     (AlohaConfig(server="pc", arms="ros2"), aloha_arms), (AlohaConfig(server="pc", arms="trossen"), lambda: None),
     (FakeSingleArmConfig(), lambda: None), (GymConfig(make=lambda fake_env: LineEnv()), lambda: None)],
)  # fmt: skip
def test_kinematics_are_those_of_the_robots_arms(config, arms):
    assert kinematics_of(config) is arms()


@pytest.mark.parametrize("server", ["", "pc"])
def test_a_users_environment_has_its_kinematics_also_behind_a_server(server):
    class Arms(LineEnv):
        def __init__(self, fake_env):
            assert fake_env, "no device is opened for them"
            super().__init__()

        def kinematics(self):
            return aloha_arms()

    wrapped = GymConfig(make=lambda fake_env: gymnasium.wrappers.TimeLimit(Arms(fake_env), 10), server=server)
    assert kinematics_of(wrapped) is aloha_arms()


def poses(count: int) -> np.ndarray:
    low, high = np.array([*fake.JOINT_LOW, 0.0] * 2), np.array([*fake.JOINT_HIGH, 1.0] * 2)
    return np.random.default_rng(0).uniform(low, high, (count, 14))


@pytest.mark.parametrize("arm", SIDES)
def test_the_inverse_reaches_its_own_half_and_stretches_towards_what_is_out_of_reach(arm):
    side = -1 if arm == fake.LEFT else 1
    for x, y, z in np.random.default_rng(1).uniform((-0.05, -0.2, 0.0), (0.3, 0.2, 0.2), (200, 3)).tolist():
        target = (side * x, y, z)
        np.testing.assert_allclose(fake.grip_point(arm, fake.inverse(arm, target)), target, atol=1e-6)
    target, shoulder = np.array([side * -0.5, 0.1, 0.4]), np.array([fake.BASE_X[arm], 0.0, fake.SHOULDER_Z])
    reached = np.array(fake.grip_point(arm, fake.inverse(arm, tuple(target)))) - shoulder
    np.testing.assert_allclose(reached, fake.REACH * (target - shoulder) / np.linalg.norm(target - shoulder), atol=1e-4)
    for z in (0.127, 0.2, 0.0, 9.0):  # at its own shoulder, and far away
        q = fake.inverse(arm, (side * 0.65, z // 1, z))
        assert all(lo <= v <= hi for lo, v, hi in zip(fake.JOINT_LOW, q, fake.JOINT_HIGH, strict=True))


def test_alohas_arms_are_those_of_the_simulated_model():
    mujoco = pytest.importorskip("mujoco", reason="the [aloha-sim] extra is not installed")
    pytest.importorskip("gym_aloha", reason="the [aloha-sim] extra is not installed")
    env = make_env(AlohaSimConfig())
    data = mujoco.MjData(env.model)
    for pose in poses(5):
        for side in SIDES:
            data.qpos[8 * side : 8 * side + 6] = pose[7 * side : 7 * side + 6]
        mujoco.mj_kinematics(env.model, data)
        for arm, name in enumerate(("left", "right")):
            body = env.model.body(f"vx300s_{name}/gripper_link").id
            frame, _ = aloha_arms().tip(arm, pose)
            np.testing.assert_allclose(frame[:3, 3] - 0.15 * frame[:3, 0], data.xpos[body], atol=2e-3)
            np.testing.assert_allclose(frame[:3, :3], data.xmat[body].reshape(3, 3), atol=2e-3)
    env.close()

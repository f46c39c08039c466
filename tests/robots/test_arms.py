"""Kinematics of the built-in arms are those of their simulators."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from actor_helpers import LineEnv

from serl_chunk.config.robots import AlohaConfig, AlohaSimConfig, FakeAlohaConfig, FakeSingleArmConfig, GymConfig
from serl_chunk.robots.arms import aloha_arms, fake_aloha_arms, kinematics_of
from serl_chunk.robots.fake import kinematics as fake
from serl_chunk.robots.registry import make_env


@pytest.mark.parametrize(
    ("config", "arms"),
    [(FakeAlohaConfig(), fake_aloha_arms), (AlohaSimConfig(), aloha_arms), (AlohaConfig(server="pc"), aloha_arms),
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


def poses(count: int = 20) -> np.ndarray:
    low, high = np.array([*fake.JOINT_LOW, 0.0] * 2), np.array([*fake.JOINT_HIGH, 1.0] * 2)
    return np.random.default_rng(0).uniform(low, high, (count, 14))


@pytest.mark.parametrize("arm", [fake.LEFT, fake.RIGHT])
def test_the_fake_arms_tip_is_its_grip_point(arm):
    for pose in poses():
        frame, _ = fake_aloha_arms().tip(arm, pose)
        simulated = fake.forward(arm, pose[7 * arm : 7 * arm + 6])
        np.testing.assert_allclose(frame[:3, 3], simulated.grip, atol=1e-9)
        np.testing.assert_allclose(frame[:3, 0], simulated.forward, atol=1e-9)


@pytest.mark.parametrize("arm", [0, 1])
def test_alohas_arms_are_those_of_the_simulated_model(arm):
    mujoco = pytest.importorskip("mujoco", reason="the [aloha-sim] extra is not installed")
    pytest.importorskip("gym_aloha", reason="the [aloha-sim] extra is not installed")
    env = make_env(AlohaSimConfig())
    data = mujoco.MjData(env.model)
    body = env.model.body(f"vx300s_{('left', 'right')[arm]}/gripper_link").id
    for pose in poses(5):
        for side in (0, 1):
            data.qpos[8 * side : 8 * side + 6] = pose[7 * side : 7 * side + 6]
        mujoco.mj_kinematics(env.model, data)
        frame, _ = aloha_arms().tip(arm, pose)
        np.testing.assert_allclose(frame[:3, 3] - 0.15 * frame[:3, 0], data.xpos[body], atol=2e-3)
        np.testing.assert_allclose(frame[:3, :3], data.xmat[body].reshape(3, 3), atol=2e-3)
    env.close()

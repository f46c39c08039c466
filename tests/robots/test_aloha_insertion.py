"""aloha_sim's insertion: its stages, gym-aloha's dynamics and rewards, the facing hands, the expert's success."""

import dataclasses
import importlib.util

import numpy as np
import pytest
from errors import naming

from serl_chunk.config.loader import load_experiment
from serl_chunk.config.robots import AlohaSimConfig
from serl_chunk.robots import registry
from serl_chunk.robots.aloha_sim.env import insertion_stage
from serl_chunk.robots.aloha_sim.experts import GRIP, MEET, PITCH, facing_joints, push
from serl_chunk.types import ConfigError

LEFT, RIGHT = "vx300s_left/10_left_gripper_finger", "vx300s_right/10_right_gripper_finger"


def stage(*pairs):
    return insertion_stage({frozenset(p) for p in pairs})


class TestStages:
    def test_each_of_gym_alohas(self):
        held = (("socket-3", LEFT), ("red_peg", RIGHT))
        assert stage() == stage(held[0]) == stage(held[1]) == 0
        assert stage(*held, ("red_peg", "table")) == 1
        assert stage(*held, ("socket-2", "table")) == 1
        assert stage(*held) == 2
        assert stage(*held, ("red_peg", "socket-4")) == 3
        assert stage(("red_peg", "socket-4"), ("socket-1", "table")) == 0
        assert stage(("red_peg", "pin"), ("red_peg", "table")) == 4


class TestSettings:
    def test_the_specification_tells_the_tasks_apart(self):
        cube, peg = (registry.robot_spec(AlohaSimConfig(env_name=n)) for n in ("transfer_cube", "insertion"))
        assert (cube.name, cube.state_dim) == ("aloha_sim", 21)
        assert (peg.name, peg.state_dim) == ("aloha_sim insertion", 28)
        assert cube.digest() != peg.digest()
        assert registry.robot_spec(AlohaSimConfig(env_name="insertion", cube_in_state=False)).state_dim == 14

    def test_the_task_in_words_follows_the_name_unless_it_is_ones_own(self):
        peg = dataclasses.replace(AlohaSimConfig(), env_name="insertion")
        assert "socket" in peg.task
        assert "cube" in dataclasses.replace(peg, env_name="transfer_cube").task
        assert AlohaSimConfig(env_name="insertion", task="my words").task == "my words"

    def test_another_name_is_refused(self):
        with pytest.raises(ConfigError, match=naming("robot.env_name", "insert", "transfer_cube", "insertion")):
            AlohaSimConfig(env_name="insert")

    def test_the_experiment_is_of_this_task(self):
        assert load_experiment("aloha_insertion").robot.env_name == "insertion"


def test_the_push_takes_out_what_the_grasps_shifted():
    apart, higher = np.array([0.1, 0, 0]), np.array([0, 0, 0.02])
    straight = push(MEET + apart, MEET - apart)
    high = push(MEET + apart + higher, MEET - apart)
    np.testing.assert_allclose(straight[-1, :7], high[-1, :7])
    last = np.asarray(straight[-1:, 7:13]), np.asarray(high[-1:, 7:13])
    goal = MEET + np.array([0.042, 0, 0])
    np.testing.assert_allclose(last[0], facing_joints(goal[None], right=True))
    np.testing.assert_allclose(last[1], facing_joints((goal - higher)[None], right=True))


if not all(importlib.util.find_spec(name) for name in ("mujoco", "gym_aloha")):
    pytest.skip("the [aloha-sim] extra is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def env():
    env = registry.make_env(AlohaSimConfig(env_name="insertion"))
    yield env
    env.close()


def test_follows_gym_aloha_bit_for_bit(env):
    """Joints, peg, socket and reward equal those of gym-aloha's own task through a whole insertion."""
    dm_mujoco = pytest.importorskip("dm_control.mujoco")
    from dm_control.rl import control
    from gym_aloha.constants import ASSETS_DIR
    from gym_aloha.tasks import sim

    class Unrendered(sim.InsertionTask):
        def get_observation(self, physics):
            return {"joints": self.get_qpos(physics), "objects": self.get_env_state(physics)}

    physics = dm_mujoco.Physics.from_xml_path(str(ASSETS_DIR / "bimanual_viperx_insertion.xml"))
    theirs = control.Environment(physics, Unrendered(), float("inf"), control_timestep=0.02)
    env.reset(seed=11)
    sim.BOX_POSE[0] = env.object_poses.ravel()
    theirs.reset()
    expert = registry.make_expert(env)
    expert.reset(0)
    stages = set()
    for _ in range(212):
        action = expert.act()
        observation, reward, terminated, _, info = env.step(action)
        step = theirs.step(action.astype(np.float64))
        expected = np.concatenate([step.observation["joints"], step.observation["objects"]])
        np.testing.assert_array_equal(observation["state"], expected.astype(np.float32))
        assert info["stage"] == step.reward
        assert (reward, terminated, info["success"]) == ((1.0, True, True) if step.reward == 4 else (0, False, False))
        stages.add(info["stage"])
    assert stages >= {0, 1, 2, 4}  # 3 only where the peg brushes the socket's wall on its way to the pin


def test_a_seed_fixes_both_objects_in_their_regions(env):
    first = env.reset(seed=3)[0]["state"]
    np.testing.assert_array_equal(env.reset(seed=3)[0]["state"], first)
    for _ in range(20):
        peg, socket = env.reset()[0]["state"][14:].reshape(2, 7)
        assert 0.1 <= peg[0] <= 0.2
        assert -0.2 <= socket[0] <= -0.1
        assert all(0.4 <= thing[1] <= 0.6 for thing in (peg, socket))


@pytest.mark.parametrize("right", [False, True])
def test_hands_face_straight_wherever_they_are(env, right):
    import mujoco

    side = -1.0 if right else 1.0
    position = np.random.default_rng(0).uniform((-0.15, 0.4, 0.02), (0.0, 0.6, 0.2), (20, 3)) * (side, 1, 1)
    joints = facing_joints(position, right=right)
    data = mujoco.MjData(env.model)
    body = env.model.body(f"vx300s_{'right' if right else 'left'}/gripper_link").id
    c, s = np.cos(PITCH), np.sin(PITCH)
    facing = np.array([[side * c, 0, side * s], [0, side, 0], [-s, 0, c]])
    for i in range(20):
        data.qpos[8 * right : 8 * right + 6] = joints[i]
        mujoco.mj_forward(env.model, data)
        axes = data.xmat[body].reshape(3, 3)
        np.testing.assert_allclose(axes, facing, atol=1e-4)
        np.testing.assert_allclose(data.xpos[body] + (GRIP - 0.069744) * axes[:, 0], position[i], atol=1e-4)


@pytest.mark.parametrize("noise", [0.0, 0.003])
def test_the_expert_inserts_with_time_to_spare(env, noise):
    expert = registry.make_expert(env)
    expert.noise = noise
    for seed in range(300, 305):
        env.reset(seed=seed)
        expert.reset(seed)
        terminated = truncated = False
        while not (terminated or truncated):
            action = expert.act()
            assert env.action_space.contains(action)
            _, _, terminated, truncated, _ = env.step(action)
        assert terminated, f"seed {seed} failed"
        assert env.tick < 230

"""aloha_sim: the model's constants, gym-aloha's dynamics and stages, rendering on request, exact restore, expert."""

import dataclasses
import importlib.util
import os
import subprocess
import sys

import gymnasium
import numpy as np
import pytest
from errors import naming

from serl_chunk.config.robots import AlohaSimConfig
from serl_chunk.devices.registry import make_intervention
from serl_chunk.robots import registry
from serl_chunk.robots.aloha_sim.camera import AlohaSimCamera
from serl_chunk.robots.aloha_sim.env import ARM_HIGH, ARM_LOW, CAMERAS, aloha_sim_spec
from serl_chunk.robots.aloha_sim.experts import GRIP, arm_joints
from serl_chunk.robots.mujoco_camera import MujocoCamera
from serl_chunk.types import ConfigError, DataError, RobotSpec
from serl_chunk_robot.drivers.camera import CameraError

# Looked up, not imported: how MuJoCo renders is fixed by its first import, which is what is tested here.
if not all(importlib.util.find_spec(name) for name in ("mujoco", "gym_aloha")):
    pytest.skip("the [aloha-sim] extra is not installed", allow_module_level=True)

HOLD = np.array([0, -0.96, 1.16, 0, -0.3, 0, 0.1] * 2, np.float32)  # the start pose, as a command


@pytest.fixture(scope="module")
def env():
    env = registry.make_env(AlohaSimConfig(max_episode_steps=300))
    yield env
    env.close()


TRY = "try:\n    {}\nexcept ConfigError as error:\n    print(error)\n"


def run_python(code, **environ):
    """What `code` prints in a process of its own, after the usual imports; fails if it fails."""
    imports = (
        "import sys\n"
        "from serl_chunk.config.robots import AlohaSimConfig\n"
        "from serl_chunk.robots.registry import make_env, robot_spec\n"
        "from serl_chunk.types import ConfigError\n"
    )
    environ = {**os.environ, "PYTHONPATH": os.getcwd(), **environ}
    done = subprocess.run([sys.executable, "-c", imports + code], capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
    return done.stdout


def read_images(env, cameras=None):
    """Frames, or a skip that says why where this machine has no OpenGL at all."""
    try:
        return env.read_images(cameras)
    except ConfigError as error:
        if "OpenGL" not in str(error):
            raise
        pytest.skip(f"no rendering here: {error}")


class TestSpec:
    def test_constants_are_the_models(self, env):
        model = env.model
        limits = model.actuator_ctrlrange
        for first in (0, 8):
            np.testing.assert_allclose(limits[first : first + 6, 0], ARM_LOW)
            np.testing.assert_allclose(limits[first : first + 6, 1], ARM_HIGH)
        assert tuple(model.camera(i).name for i in range(model.ncam)) == CAMERAS

    def test_a_learner_reads_it_without_the_simulator(self):
        run_python(
            "spec = robot_spec(AlohaSimConfig())\n"
            "assert spec.state_dim == 21 and spec.action_dim == 14, spec\n"
            "loaded = [m for m in ('mujoco', 'dm_control', 'gym_aloha', 'jax') if m in sys.modules]\n"
            "assert not loaded, loaded\n"
        )

    def test_state_without_the_cube(self):
        spec = aloha_sim_spec(AlohaSimConfig(cube_in_state=False, cameras=("top",), image_size=32))
        assert spec.state_dim == 14
        assert [(c.name, c.height, c.width) for c in spec.cameras] == [("top", 32, 32)]
        assert RobotSpec.from_json(spec.to_json()) == spec

    def test_cameras_are_checked(self):
        with pytest.raises(ConfigError, match=naming("robot.cameras", "wrist", "left_wrist")):
            aloha_sim_spec(AlohaSimConfig(cameras=("top", "wrist")))
        with pytest.raises(ConfigError, match=naming("robot.cameras", "top, top")):
            aloha_sim_spec(AlohaSimConfig(cameras=("top", "top")))

    def test_a_missing_extra_is_named(self):
        said = run_python("sys.modules['mujoco'] = None\n" + TRY.format("make_env(AlohaSimConfig())"))
        assert "pip install 'serl-chunk[aloha-sim]'" in said

    def test_without_opengl_joints_work_and_frames_say_what_to_install(self):
        code = "env = make_env(AlohaSimConfig())\nenv.reset(seed=0)\n" + TRY.format("env.read_images()")
        said = run_python(code, MUJOCO_GL="disabled")
        assert "apt install libegl1" in said


class TestEpisode:
    def test_follows_gym_aloha_bit_for_bit(self, env):
        """Joints, cube and reward equal those of gym-aloha's own task through a whole transfer."""
        dm_mujoco = pytest.importorskip("dm_control.mujoco")
        from dm_control.rl import control
        from gym_aloha.constants import ASSETS_DIR
        from gym_aloha.tasks import sim

        class Unrendered(sim.TransferCubeTask):
            def get_observation(self, physics):
                return {"joints": self.get_qpos(physics), "cube": self.get_env_state(physics)}

        physics = dm_mujoco.Physics.from_xml_path(str(ASSETS_DIR / "bimanual_viperx_transfer_cube.xml"))
        theirs = control.Environment(physics, Unrendered(), float("inf"), control_timestep=0.02)
        env.reset(seed=11)
        sim.BOX_POSE[0] = env.object_poses[0]
        theirs.reset()
        expert = registry.make_expert(env)
        expert.reset(0)
        stages = set()
        for _ in range(170):
            action = expert.act()
            observation, reward, terminated, _, info = env.step(action)
            step = theirs.step(action.astype(np.float64))
            expected = np.concatenate([step.observation["joints"], step.observation["cube"]])
            np.testing.assert_array_equal(observation["state"], expected.astype(np.float32))
            assert info["stage"] == step.reward
            assert (reward, terminated, info["success"]) == (
                (1.0, True, True) if step.reward == 4 else (0, False, False)
            )
            stages.add(info["stage"])
        assert {0, 2, 4} <= stages

    def test_a_seed_fixes_the_cube(self, env):
        first = env.reset(seed=3)[0]["state"]
        other = env.reset(seed=4)[0]["state"]
        np.testing.assert_array_equal(env.reset(seed=3)[0]["state"], first)
        assert not np.array_equal(first[14:16], other[14:16])
        for _ in range(20):
            x, y = env.reset()[0]["state"][14:16]
            assert 0 <= x <= 0.2
            assert 0.4 <= y <= 0.6

    def test_holds_its_start_pose_which_the_declared_box_of_gym_aloha_cannot(self, env):
        start = env.reset(seed=0)[0]["state"][:14]
        assert np.abs(start).max() > 1
        for _ in range(25):
            observation = env.step(HOLD)[0]
        np.testing.assert_allclose(observation["state"][:14], start, atol=0.02)

    def test_clips_and_reports_what_it_executed(self, env):
        env.reset(seed=0)
        info = env.step(np.full(14, 9.0, np.float32))[4]
        np.testing.assert_array_equal(info["executed_action"], np.float32(env.robot_spec.action_high))

    @pytest.mark.parametrize("action", [np.zeros(13, np.float32), np.full(14, np.nan, np.float32)])
    def test_refuses_what_physics_cannot_take(self, env, action):
        env.reset(seed=0)
        with pytest.raises(DataError, match=naming("aloha_sim", "action", 14)):
            env.step(action)

    def test_truncates_at_its_time_limit(self):
        env = registry.make_env(AlohaSimConfig(max_episode_steps=4))
        env.reset(seed=0)
        ends = [env.step(HOLD)[2:4] for _ in range(4)]
        assert ends == [(False, False)] * 3 + [(False, True)]

    def test_the_same_actions_give_the_same_bits_in_another_environment(self, env):
        env.reset(seed=5)
        expert = registry.make_expert(env)
        expert.reset(0)
        actions = [expert.act() for _ in range(110)]  # the cube is between the fingers: contacts matter
        expected = [env.step(a)[0]["state"] for a in actions]
        other = registry.make_env(AlohaSimConfig())
        other.reset(seed=6)
        other.step(HOLD)
        other.reset(seed=5)
        assert other.tick == 0
        np.testing.assert_array_equal([other.step(a)[0]["state"] for a in actions], expected)
        other.close()


class TestImages:
    def test_renders_only_when_asked(self, env, monkeypatch):
        def refuse(camera, data, name):
            raise AssertionError("rendered without being asked")

        monkeypatch.setattr(MujocoCamera, "frame", refuse)
        assert set(env.reset(seed=0)[0]) == {"state"}
        assert set(env.step(HOLD)[0]) == {"state"}

    def test_frames_have_the_size_asked_for_and_show_the_moment(self):
        env = registry.make_env(AlohaSimConfig(image_size=48, cameras=("top", "right_wrist")))
        env.reset(seed=0)
        frames = read_images(env)
        assert {k: (v.shape, v.dtype) for k, v in frames.items()} == {
            "images/top": ((48, 48, 3), np.uint8),
            "images/right_wrist": ((48, 48, 3), np.uint8),
        }
        top = frames["images/top"]
        reddish = (top[..., 0] > 150) & (top[..., 1] < 80)
        assert reddish.any()  # the cube
        for _ in range(10):
            env.step(np.where(np.arange(14) == 7, 0.6, HOLD))
        later = env.read_images(["top"])
        assert list(later) == ["images/top"]
        assert not np.array_equal(later["images/top"], top)
        with pytest.raises(ConfigError, match=naming("aloha_sim", "angle", "top", "right_wrist")):
            env.read_images(["angle"])
        env.close()

    def test_always_matches_its_spaces(self):
        env = registry.make_env(AlohaSimConfig(image_size=32), images="always")
        probe = registry.make_env(AlohaSimConfig(image_size=32))
        probe.reset(seed=0)
        read_images(probe)
        probe.close()
        observation, _ = env.reset(seed=0)
        assert env.observation_space.contains(observation)
        assert env.observation_space.contains(env.step(HOLD)[0])
        env.close()


class TestExpert:
    @pytest.mark.parametrize("right", [False, True])
    def test_inverse_kinematics_agree_with_the_model(self, env, right):
        import mujoco

        rng = np.random.default_rng(0)
        position = rng.uniform((-0.1, 0.4, 0.05), (0.1, 0.6, 0.3), (20, 3))
        pitch, roll = rng.uniform(0, 1.2, 20), rng.uniform(-1, 1, 20)
        joints = arm_joints(position, pitch, roll, right=right)
        data = mujoco.MjData(env.model)
        body = env.model.body(f"vx300s_{'right' if right else 'left'}/gripper_link").id
        for i in range(20):
            data.qpos[8 * right : 8 * right + 6] = joints[i]
            mujoco.mj_forward(env.model, data)
            approach = data.xmat[body].reshape(3, 3)[:, 0]
            np.testing.assert_allclose(data.xpos[body] + (GRIP - 0.069744) * approach, position[i], atol=1e-4)
            assert np.arcsin(-approach[2]) == pytest.approx(pitch[i], abs=1e-4)

    @pytest.mark.parametrize("noise", [0.0, 0.005])
    def test_transfers_the_cube_with_time_to_spare(self, env, noise):
        expert = registry.make_expert(env)
        expert.noise = noise
        for seed in range(100, 108):
            env.reset(seed=seed)
            expert.reset(seed)
            terminated = truncated = False
            while not (terminated or truncated):
                action = expert.act()
                assert env.action_space.contains(action)
                _, _, terminated, truncated, _ = env.step(action)
            assert terminated, f"seed {seed} failed"
            assert env.tick < 200

    def test_the_left_arm_ends_up_with_the_cube(self, env):
        """Past the end of the episode: released by the right hand, held by the left one, the last command held."""
        env.reset(seed=1)
        expert = registry.make_expert(env)
        expert.reset(1)
        commands = [expert.act() for _ in range(230)]
        for command in commands:
            info = env.step(command)[4]
        assert info["stage"] == 4
        assert env.object_poses[0][2] > 0.2
        np.testing.assert_array_equal(commands[-1], commands[-20])

    def test_noise_is_smooth_seeded_and_spares_the_grippers(self, env):
        env.reset(seed=2)

        def commands(seed, noise):
            expert = registry.make_expert(env)
            expert.noise = noise
            expert.reset(seed)
            return np.stack([expert.act() for _ in range(150)])

        clean, noisy = commands(0, 0.0), commands(0, 0.02)
        difference = noisy - clean
        np.testing.assert_array_equal(noisy, commands(0, 0.02))
        assert not np.array_equal(noisy, commands(1, 0.02))
        assert not difference[:, [6, 13]].any()
        arms = np.delete(difference, [6, 13], axis=1)[50:]
        assert 0.01 < arms.std() < 0.03
        assert np.diff(arms, axis=0).std() < arms.std() / 2

    def test_a_missing_scripted_human_is_reported(self, env):
        assert make_intervention("none", env) is None
        with pytest.raises(ConfigError, match=naming("aloha_sim", "actor.intervention", "none")):
            make_intervention("scripted", env)


def test_every_option_changes_something(env):
    """No dead options: each field of the configuration shows in the specification or the episode."""
    changed = {
        "env_name": "insertion",
        "max_episode_steps": 7,
        "cube_in_state": False,
        "image_size": 32,
        "cameras": ("top",),
    }
    fields = {f.name for f in dataclasses.fields(AlohaSimConfig)} - {
        "task",
        "server",
        "server_keys",
        "joints_at",
    }  # words of Begin records; another process's robot
    assert set(changed) == fields
    for name, value in changed.items():
        spec = aloha_sim_spec(dataclasses.replace(AlohaSimConfig(), **{name: value}))
        assert spec != env.robot_spec
    assert isinstance(env, gymnasium.Env)


@pytest.mark.parametrize("env_name", ["transfer_cube", "insertion"])
def test_a_camera_behind_a_robot_server_draws_the_same_picture(env_name):
    env = registry.make_env(AlohaSimConfig(env_name=env_name, cameras=("top",), image_size=48))
    env.reset(seed=3)
    for _ in range(3):
        env.step(HOLD + np.float32(0.02))
    camera = AlohaSimCamera("top", env_name, size=48)
    objects = env.object_poses.reshape(-1)
    expected = read_images(env)["images/top"].astype(int)
    drawn = camera._draw(env.joints, {"objects": objects}).astype(int)
    assert np.abs(drawn - expected).mean() < 0.02, "fingers of a simulation mirror each other but nearly"
    objects[:2] += 0.1
    assert np.abs(camera._draw(env.joints, {"objects": objects}) - expected).mean() > 0.1
    with pytest.raises(CameraError, match="14 joints and 3 numbers of objects, expected 14 and"):
        camera._draw(env.joints, {"objects": objects[:3]})
    env.close()


@pytest.mark.parametrize("options", [{"view": "front"}, {"view": "top", "env_name": "pour"}])
def test_a_camera_that_the_model_lacks_is_refused(options):
    with pytest.raises(ValueError, match="valid are"):
        AlohaSimCamera(**options)

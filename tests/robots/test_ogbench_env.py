"""OGBench behind the environment contract: rewards and ends as its data has them, specifications, start states."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from errors import naming

from serl_chunk import extras
from serl_chunk.config.robots import OgbenchConfig
from serl_chunk.data.formats.ogbench import OgbenchSource
from serl_chunk.data.source import ReadOptions
from serl_chunk.robots import registry
from serl_chunk.robots.ogbench import ENVIRONMENTS, ogbench_spec
from serl_chunk.types import ConfigError, DataError

pytestmark = pytest.mark.system

PLAY = Path(__file__).parents[1] / "data" / "ogbench_play.npz"  # rows of cube-single-play
STILL = np.zeros(5, np.float32)

# Looked up, not imported: how MuJoCo renders is fixed by its first import.
installed = pytest.mark.skipif(
    importlib.util.find_spec("ogbench") is None, reason="the [ogbench] extra is not installed"
)


@pytest.fixture(scope="module")
def env() -> Any:
    env = registry.make_env(OgbenchConfig())
    yield env
    env.close()


def name_of(environment: str, task: int = 1) -> str:
    return f"{environment}-play-singletask-task{task}-v0"


class TestSpec:
    @pytest.mark.parametrize(
        ("name", "near"),
        [
            ("cube-singel-play-singletask-task1-v0", "cube-single-play-singletask-task1-v0"),
            ("scene-play-singletask-task6-v0", "scene-play-singletask-task5-v0"),
            ("visual-scene-play-singletask-task1-v0", "5"),
            ("antmaze-large-navigate-singletask-v0", "cube-quadruple, cube-octuple, scene, puzzle-3x3"),
        ],
    )
    def test_an_unknown_name_is_answered_with_valid_ones(self, name: str, near: str) -> None:
        with pytest.raises(
            ConfigError, match=naming("robot.env_name", name, "ENV-play|noisy-singletask-taskN-v0", near)
        ):
            ogbench_spec(OgbenchConfig(env_name=name))

    def test_the_default_task_and_noisy_data_are_names_too(self) -> None:
        for name in ("scene-play-singletask-v0", "scene-noisy-singletask-task3-v0"):
            assert ogbench_spec(OgbenchConfig(env_name=name)).state_dim == 40

    def test_another_task_or_reward_is_another_robot(self) -> None:
        """The handshake compares names: a learner of one task refuses an actor of another."""
        configs = [OgbenchConfig(), OgbenchConfig(env_name=name_of("cube-single", 2)), OgbenchConfig(reward="dense")]
        assert len({ogbench_spec(c).name for c in configs}) == 3

    def test_a_time_limit_of_ones_own(self) -> None:
        assert ogbench_spec(OgbenchConfig()).max_episode_steps == 200
        assert ogbench_spec(OgbenchConfig(max_episode_steps=17)).max_episode_steps == 17

    def test_its_data_has_the_name_without_the_task(self) -> None:
        hint = OgbenchConfig(env_name="puzzle-4x4-noisy-singletask-v0").data_hint
        assert "download_datasets(['puzzle-4x4-noisy-v0'])" in hint
        assert hint.endswith("--demo_path ~/.ogbench/data/puzzle-4x4-noisy-v0.npz")

    def test_a_learner_reads_it_without_the_simulator(self) -> None:
        code = (
            "import sys\n"
            "from serl_chunk.config.robots import OgbenchConfig\n"
            "from serl_chunk.robots.registry import robot_spec\n"
            "assert robot_spec(OgbenchConfig()).action_dim == 5\n"
            "loaded = [m for m in ('ogbench', 'mujoco', 'dm_control', 'jax') if m in sys.modules]\n"
            "assert not loaded, loaded\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    @installed
    @pytest.mark.parametrize(
        "environment",
        [pytest.param(e, marks=() if e in ("cube-single", "scene") else pytest.mark.slow, id=e) for e in ENVIRONMENTS],
    )
    def test_the_table_is_the_environments(self, environment: str) -> None:
        own = extras.ogbench("this test").make_env_and_datasets(name_of(environment, 5), env_only=True)
        spec = ogbench_spec(OgbenchConfig(env_name=name_of(environment, 5)))
        assert own.observation_space.shape == (spec.state_dim,)
        assert own.action_space.low.tolist() == list(spec.action_low)
        assert own.action_space.high.tolist() == list(spec.action_high)
        assert own.spec.max_episode_steps == spec.max_episode_steps
        assert own.unwrapped.control_timestep() == pytest.approx(spec.dt)
        own.reset()
        assert own.unwrapped.model.camera(spec.cameras[0].name).id >= 0
        assert own.unwrapped.num_tasks == 5


@installed
class TestEpisodes:
    def test_starts_and_steps_like_its_specification(self, env: Any) -> None:
        assert env.robot_spec == registry.robot_spec(OgbenchConfig())
        observation, info = env.reset(seed=0)
        assert env.observation_space.contains(observation)
        assert info["success"] is False
        observation, reward, terminated, truncated, info = env.step(np.full(5, 9.0))
        assert env.observation_space.contains(observation)
        assert (reward, terminated, truncated, info["success"], info["missing"]) == (0.0, False, False, False, 1)
        assert info["executed_action"].tolist() == [1] * 5

    def test_a_seed_reproduces_an_episode_whatever_came_before(self, env: Any) -> None:
        """To the last bit of the physics, in contact with the cube."""

        def rollout(seed: int, env: Any) -> tuple[np.ndarray, bool]:
            states = [env.reset(seed=seed)[0]["state"]]
            physics = [env.simulation.data.qpos.copy()]
            rng = np.random.default_rng(seed)
            touched = False
            cube = env.simulation.data.joint("object_joint_0").qpos[:3].copy()
            for t in range(60):
                here = env.simulation.data.site("ur5e/robotiq/pinch").xpos
                down = np.append(np.clip((cube - here) * 20, -1, 1), [0, 1 if t > 30 else -1])
                states.append(env.step(down + rng.normal(0, 0.1, 5))[0]["state"])
                physics.append(env.simulation.data.qpos.copy())
                touched |= bool(env.simulation.data.joint("object_joint_0").qpos[2] != cube[2])
            return np.concatenate([np.stack(states), np.stack(physics)], axis=1), touched

        first, touched = rollout(5, env)
        assert touched
        other, _ = rollout(6, env)
        assert not np.array_equal(first, other)
        again, _ = rollout(5, env)
        np.testing.assert_array_equal(first, again)
        fresh = registry.make_env(OgbenchConfig())
        np.testing.assert_array_equal(first, rollout(5, fresh)[0])
        fresh.close()

    def test_the_time_limit_truncates(self) -> None:
        env = registry.make_env(OgbenchConfig(max_episode_steps=3))
        env.reset(seed=0)
        ends = [env.step(STILL)[2:4] for _ in range(3)]
        assert ends == [(False, False), (False, False), (False, True)]
        env.reset(seed=0)
        assert env.step(STILL)[2:4] == (False, False)
        env.close()

    def test_agrees_with_the_data_on_every_state(self, env: Any) -> None:
        """Each row's state, set in the simulation and held for a tick, is judged as the reader judged the row."""
        rows = np.load(PLAY)
        source = OgbenchSource(PLAY, ReadOptions(env=OgbenchConfig().env_name))
        judged = {}  # row that a step leads to -> reward and termination in the data
        for key in source.keys():
            episode = source.read(key)
            start = int(key.split(":")[1])
            for t, given in enumerate(episode.steps.reward):
                last = t == episode.steps.n - 1
                judged[start + t + 1] = (float(given), last and episode.end.terminated)
        assert {r for r, _ in judged.values()} == {0.0, 1.0}
        env.reset(seed=0)
        for row in (*range(25, 36), *range(91, 119, 7)):
            env.simulation.set_state(rows["qpos"][row].astype(float), np.zeros(env.simulation.model.nv))
            _, given, terminated, _, info = env.step(STILL)
            assert (given, terminated) == judged[row], row
            assert info["success"] == terminated

    def test_a_diverged_simulation_and_a_bad_action_are_refused(self, env: Any) -> None:
        env.reset(seed=0)
        with pytest.raises(DataError, match=naming("cube-single-play-singletask-task1-v0", "action", 5)):
            env.step(np.zeros(4))
        with pytest.raises(DataError, match=naming("cube-single-play-singletask-task1-v0", "action", 5)):
            env.step(np.full(5, np.nan))

    def test_dense_rewards_count_parts_as_the_data_does(self, tmp_path: Path) -> None:
        """Steps in the simulation, stored as OGBench stores them, have the same rewards where they are read."""
        name = name_of("scene", 4)
        env = registry.make_env(OgbenchConfig(env_name=name, reward="dense"))
        observation, _ = env.reset(seed=0)
        sim = env.simulation  # type: ignore[attr-defined]
        buttons = [np.array(b) for b in ([0, 0], [0, 1], [1, 0], [1, 1], [0, 0])]
        rows: dict[str, list[Any]] = {"observations": [observation["state"]], "qpos": [sim.data.qpos.copy()]}
        rewards = []
        for state in buttons[1:]:
            sim.set_state(sim.data.qpos.copy(), sim.data.qvel.copy(), state)
            observation, reward, terminated, _, info = env.step(STILL)
            assert not terminated
            assert reward == 1 - info["missing"]
            rewards.append(reward)
            rows["observations"].append(observation["state"])
            rows["qpos"].append(sim.data.qpos.copy())
        assert len(set(rewards)) == 3
        content = {k: np.array(v, np.float32) for k, v in rows.items()}
        content |= {"actions": np.zeros((5, 5), np.float32), "terminals": np.arange(5) == 4}
        np.savez(tmp_path / "scene.npz", button_states=np.stack(buttons), **content)
        source = OgbenchSource(tmp_path / "scene.npz", ReadOptions(env=name, env_reward="dense"))
        (key,) = source.keys()
        assert source.read(key).steps.reward.tolist() == rewards
        env.close()

    def test_frames_on_request(self) -> None:
        env = registry.make_env(OgbenchConfig(image_size=32))
        observation, _ = env.reset(seed=0)
        assert list(observation) == ["state"]
        with pytest.raises(ConfigError, match=naming("wrist", "front")):
            env.read_images(["wrist"])
        try:
            frames = env.read_images()
        except ConfigError as error:
            if "OpenGL" not in str(error):
                raise
            pytest.skip(f"no rendering here: {error}")
        assert {k: (v.shape, v.dtype) for k, v in frames.items()} == {"images/front": ((32, 32, 3), np.uint8)}
        for _ in range(10):
            env.step(np.array([0, 0, -1, 0, 0]))
        assert not np.array_equal(env.read_images(["front"])["images/front"], frames["images/front"])
        env.close()


class TestAbsence:
    def test_without_ogbench_it_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "ogbench", None)
        with pytest.raises(ConfigError, match=naming("ogbench", "pip install 'serl-chunk[ogbench]'")):
            registry.make_env(OgbenchConfig())

    def test_an_old_ogbench_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Before 1.2 an environment cannot be told which state to judge."""

        def make(name: str, env_only: bool) -> None:
            raise AssertionError("made")

        monkeypatch.setitem(sys.modules, "ogbench", SimpleNamespace(make_env_and_datasets=make))
        monkeypatch.setitem(sys.modules, "ogbench.relabel_utils", SimpleNamespace())
        with pytest.raises(
            ConfigError, match=naming("ogbench", "success_timing", "pip install --upgrade 'serl-chunk[ogbench]'")
        ):
            registry.make_env(OgbenchConfig())

"""robomimic's tasks behind the environment contract: against a stand-in for robosuite, and robosuite where it is."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from errors import naming

from serl_chunk.config.robots import RobomimicConfig
from serl_chunk.data.formats import robomimic as files
from serl_chunk.robots import registry
from serl_chunk.robots.robomimic import STATE_KEYS, TASKS, robomimic_spec
from serl_chunk.types import ConfigError, DataError

STILL = np.zeros(7, np.float32)

installed = pytest.mark.skipif(
    importlib.util.find_spec("robosuite") is None, reason="the [robomimic] extra is not installed"
)


class Stand:
    """What of a robosuite environment is used: a number drawn on reset moves by the action, and is solved at 1."""

    def __init__(self, width: int) -> None:
        self.rng = np.random.default_rng(0)
        self.width, self.closed, self.at, self.actions = width, 0, 0.0, []  # type: ignore[var-annotated]

    def reset(self) -> dict[str, Any]:
        self.at = np.random.uniform(0, 0.1) + self.rng.uniform(0, 0.1)  # noqa: NPY002 (as robosuite does)
        return self.observe()

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, dict[str, Any]]:
        self.actions.append(action)
        self.at += float(action[2])
        return self.observe(), 0.9999 if self.at >= 1 else 0.0, False, {}

    def observe(self) -> dict[str, Any]:
        return {
            "object-state": np.full(self.width, self.at),
            "robot0_gripper_qpos": np.array([7.0, 8.0]),
            "robot0_eef_quat": np.array([3.0, 4, 5, 6]),
            "robot0_proprio-state": np.zeros(40),
            "robot0_eef_pos": np.array([0.0, 1, 2]),
        }

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stands in for robosuite; what it was asked to make."""
    asked: dict[str, Any] = {}

    def make(name: str, **settings: Any) -> Stand:
        asked.update(settings, name=name, stand=Stand(10 if name == "Lift" else 14))
        return asked["stand"]

    monkeypatch.setitem(sys.modules, "robosuite", SimpleNamespace(make=make))
    return asked


def test_the_state_has_the_order_of_the_data() -> None:
    recorded = [key for key in files.STATE_KEYS if not key.startswith("robot1")]
    assert [key.replace("object-state", "object") for key in STATE_KEYS] == recorded


def test_specifications() -> None:
    assert {t: robomimic_spec(RobomimicConfig(env_name=t)).max_episode_steps for t in TASKS} == {  # type: ignore[arg-type]
        "lift": 300,
        "can": 300,
        "square": 400,
    }
    assert robomimic_spec(RobomimicConfig(max_episode_steps=9)).max_episode_steps == 9
    assert robomimic_spec(RobomimicConfig(env_name="can")).name == "robomimic can"
    assert "v1.5/can/mh/low_dim_v15.hdf5" in RobomimicConfig(env_name="can").data_hint
    with pytest.raises(ConfigError, match=naming("robot.env_name", "transport", "lift")):
        RobomimicConfig(env_name="transport")  # type: ignore[arg-type]


class TestWithAStandIn:
    def test_makes_the_published_simulation(self, made: dict[str, Any]) -> None:
        env = registry.make_env(RobomimicConfig(env_name="square"))
        assert env.robot_spec == registry.robot_spec(RobomimicConfig(env_name="square"))
        assert (made["name"], made["control_freq"], made["reward_shaping"]) == ("NutAssemblySquare", 20, False)
        assert made["lite_physics"] is False
        arm = made["controller_configs"]["body_parts"]["right"]
        assert (arm["type"], arm["input_type"], arm["input_ref_frame"]) == ("OSC_POSE", "delta", "world")
        assert arm["output_max"] == [0.05] * 3 + [0.5] * 3
        assert env.reset(seed=0)[0]["state"].shape == (23,)
        env.close()
        assert made["stand"].closed == 1

    def test_an_episode(self, made: dict[str, Any]) -> None:
        env = registry.make_env(RobomimicConfig(max_episode_steps=4))
        observation, info = env.reset(seed=0)
        assert env.observation_space.contains(observation)
        assert observation["state"][:9].tolist() == list(range(9))
        assert info["success"] is False
        up = np.array([0, 0, 0.5, 0, 0, 0, 0])
        assert env.step(up)[1:4] == (0.0, False, False)
        _, reward, terminated, truncated, info = env.step(up * 9)
        assert (reward, terminated, truncated, info["success"]) == (1.0, True, False, True)
        assert info["executed_action"].tolist() == [0, 0, 1, 0, 0, 0, 0] == made["stand"].actions[-1].tolist()
        env.reset()
        assert [env.step(STILL)[2:4] for _ in range(4)][2:] == [(False, False), (False, True)]

    def test_a_seed_reproduces_a_start_and_leaves_numpys_generator_alone(self, made: dict[str, Any]) -> None:
        env = registry.make_env(RobomimicConfig())
        np.random.seed(5)  # noqa: NPY002
        expected = np.random.uniform()  # noqa: NPY002
        np.random.seed(5)  # noqa: NPY002
        starts = [env.reset(seed=s)[0]["state"][-1] for s in (1, 2, 1, None, None)]
        assert np.random.uniform() == expected  # noqa: NPY002
        assert starts[0] == starts[2]
        assert len(set(starts)) == 4

    def test_bad_numbers_are_refused(self, made: dict[str, Any]) -> None:
        env = registry.make_env(RobomimicConfig())
        env.reset(seed=0)
        for bad in (np.zeros(6), np.full(7, np.inf)):
            with pytest.raises(DataError, match=naming("action", "lift", 7)):
                env.step(bad)
        made["stand"].at = np.nan
        with pytest.raises(DataError, match=naming("lift", "state")):
            env.step(STILL)


def test_without_robosuite_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "robosuite", None)
    with pytest.raises(ConfigError, match=naming("robomimic", "robosuite", "pip install 'serl-chunk[robomimic]'")):
        registry.make_env(RobomimicConfig())


@installed
class TestWithRobosuite:
    @pytest.mark.parametrize("task", list(TASKS))
    def test_starts_reproducibly(self, task: Any) -> None:
        env = registry.make_env(RobomimicConfig(env_name=task))

        def rollout(seed: int) -> np.ndarray:
            states = [env.reset(seed=seed)[0]["state"]]
            rng = np.random.default_rng(seed)
            states += [env.step(rng.uniform(-1, 1, 7))[0]["state"] for _ in range(15)]
            return np.stack(states)

        first = rollout(1)
        assert first.shape == (16, env.robot_spec.state_dim)
        assert not np.array_equal(first, rollout(2))
        np.testing.assert_array_equal(first, rollout(1))
        env.close()

    def test_a_lifted_cube_ends_the_episode(self) -> None:
        """robosuite's own positions in the state: hand 0..2, cube 9..11."""
        env = registry.make_env(RobomimicConfig())
        state = env.reset(seed=0)[0]["state"]
        for t in range(120):
            away = state[9:12] - state[:3] if t < 40 else np.zeros(3)
            away = np.array([0, 0, 0.05]) if t >= 55 else away
            move = np.clip(away / 0.05, -1, 1)
            observation, reward, terminated, truncated, info = env.step(
                np.append(move, [0, 0, 0, 1 if t >= 40 else -1])
            )
            state = observation["state"]
            if terminated:
                break
            assert reward == 0
        assert (terminated, truncated, reward, info["success"]) == (True, False, 1.0, True)
        env.close()

    def test_frames_on_request(self) -> None:
        env = registry.make_env(RobomimicConfig(image_size=32))
        env.reset(seed=0)
        try:
            before = env.read_images()["images/agentview"]
        except ConfigError as error:
            if "OpenGL" not in str(error):
                raise
            pytest.skip(f"no rendering here: {error}")
        assert (before.shape, before.dtype) == ((32, 32, 3), np.uint8)
        env.reset(seed=1)  # another model
        assert not np.array_equal(env.read_images(["agentview"])["images/agentview"], before)
        env.close()

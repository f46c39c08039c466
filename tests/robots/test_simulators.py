"""OGBench behind the environment contract: rewards and ends as its data has them, specifications, start states."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from errors import naming
from robosuite_stand_in import stand_in

from serl_chunk import extras
from serl_chunk.config.robots import OgbenchConfig, RobomimicConfig
from serl_chunk.data.fields import CONVENTIONS
from serl_chunk.data.formats.ogbench import OgbenchSource
from serl_chunk.data.source import ReadOptions
from serl_chunk.robots import registry
from serl_chunk.robots.ogbench import ENVIRONMENTS, ogbench_spec
from serl_chunk.robots.robomimic import STATE_KEYS, TASKS, robomimic_spec
from serl_chunk.types import DataError

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


@pytest.mark.system
@installed
@pytest.mark.parametrize(
    "environment",
    [pytest.param(e, marks=() if e in ("cube-single", "scene") else pytest.mark.slow, id=e) for e in ENVIRONMENTS],
)
def test_the_table_is_the_environments(environment: str) -> None:
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


@pytest.mark.system
@installed
def test_agrees_with_the_data_on_every_state(env: Any) -> None:
    """Each row's state, set in the simulation and held for a tick, is judged as the reader judged the row."""
    rows = np.load(PLAY)
    source = OgbenchSource(PLAY, ReadOptions(env=OgbenchConfig().env_name))
    judged = {}  # row that a step leads to -> reward and termination in the data
    for key in source.keys():
        episode, start = source.read(key), int(key.split(":")[1])
        for t, given in enumerate(episode.steps.reward):
            judged[start + t + 1] = (float(given), t == episode.steps.n - 1 and episode.end.terminated)
    assert {r for r, _ in judged.values()} == {0.0, 1.0}
    env.reset(seed=0)
    for row in (*range(25, 36), *range(91, 119, 7)):
        env.simulation.set_state(rows["qpos"][row].astype(float), np.zeros(env.simulation.model.nv))
        _, given, terminated, _, info = env.step(STILL)
        assert (given, terminated) == judged[row], row
        assert info["success"] == terminated


@pytest.mark.system
@installed
def test_dense_rewards_count_parts_as_the_data_does(tmp_path: Path) -> None:
    """Steps in the simulation, stored as OGBench stores them, have the same rewards where they are read."""
    name = name_of("scene", 4)
    env = registry.make_env(OgbenchConfig(env_name=name, reward="dense"))
    observation, _ = env.reset(seed=0)
    sim = env.simulation  # type: ignore[attr-defined]
    buttons = [np.array(b) for b in ([0, 0], [0, 1], [1, 0], [1, 1], [0, 0])]
    rows: list[tuple[np.ndarray, np.ndarray]] = [(observation["state"], sim.data.qpos.copy())]
    rewards = []
    for state in buttons[1:]:
        sim.set_state(sim.data.qpos.copy(), sim.data.qvel.copy(), state)
        observation, reward, terminated, _, info = env.step(STILL)
        assert not terminated
        assert reward == 1 - info["missing"]
        rewards.append(reward)
        rows.append((observation["state"], sim.data.qpos.copy()))
    assert len(set(rewards)) == 3
    observations, qpos = (np.array(column, np.float32) for column in zip(*rows, strict=True))
    np.savez(
        tmp_path / "scene.npz", observations=observations, qpos=qpos, actions=np.zeros((5, 5), np.float32),
        terminals=np.arange(5) == 4, button_states=np.stack(buttons),
    )  # fmt: skip
    source = OgbenchSource(tmp_path / "scene.npz", ReadOptions(env=name, env_reward="dense"))
    (key,) = source.keys()
    assert source.read(key).steps.reward.tolist() == rewards
    env.close()


robosuite_installed = pytest.mark.skipif(
    importlib.util.find_spec("robosuite") is None, reason="the [robomimic] extra is not robosuite_installed"
)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return stand_in(monkeypatch)


def test_it_makes_the_published_simulation_in_the_order_of_the_data(made: dict[str, Any]) -> None:
    recorded = [key.removeprefix("obs/") for key in CONVENTIONS["robomimic"][1] if "robot1" not in key]
    assert [key.replace("object-state", "object") for key in STATE_KEYS] == recorded
    limits = {t: robomimic_spec(RobomimicConfig(env_name=t)).max_episode_steps for t in TASKS}  # type: ignore[arg-type]
    assert limits == {"lift": 300, "can": 300, "square": 400}
    assert robomimic_spec(RobomimicConfig(env_name="can")).name == "robomimic can"
    assert "v1.5/can/mh/low_dim_v15.hdf5" in RobomimicConfig(env_name="can").data_hint
    env = registry.make_env(RobomimicConfig(env_name="square"))
    assert (made["name"], made["control_freq"], made["reward_shaping"]) == ("NutAssemblySquare", 20, False)
    assert made["lite_physics"] is False
    arm = made["controller_configs"]["body_parts"]["right"]
    assert (arm["type"], arm["input_type"], arm["input_ref_frame"]) == ("OSC_POSE", "delta", "world")
    assert arm["output_max"] == [0.05] * 3 + [0.5] * 3
    assert env.reset(seed=0)[0]["state"].shape == (23,)
    env.close()
    assert made["stand"].closed == 1


def test_an_episode_ends_at_success_and_what_diverges_is_refused(made: dict[str, Any]) -> None:
    env = registry.make_env(RobomimicConfig(max_episode_steps=4))
    assert env.reset(seed=0)[0]["state"][:9].tolist() == list(range(9))
    up = np.array([0, 0, 0.5, 0, 0, 0, 0])
    assert env.step(up)[1:4] == (0.0, False, False)
    _, reward, terminated, truncated, info = env.step(up * 9)
    assert (reward, terminated, truncated, info["success"]) == (1.0, True, False, True)
    assert info["executed_action"].tolist() == [0, 0, 1, 0, 0, 0, 0] == made["stand"].actions[-1].tolist()
    made["stand"].at = np.nan
    with pytest.raises(DataError, match=naming("lift", "state")):
        env.step(np.zeros(7, np.float32))


@robosuite_installed
def test_a_lifted_cube_ends_the_episode() -> None:
    """robosuite's own positions in the state: hand 0..2, cube 9..11."""
    env = registry.make_env(RobomimicConfig())
    state = env.reset(seed=0)[0]["state"]
    for t in range(120):
        away = state[9:12] - state[:3] if t < 40 else np.array([0, 0, 0.05 if t >= 55 else 0.0])
        command = np.append(np.clip(away / 0.05, -1, 1), [0, 0, 0, 1 if t >= 40 else -1])
        observation, reward, terminated, truncated, info = env.step(command)
        state = observation["state"]
        if terminated:
            break
        assert reward == 0
    assert (terminated, truncated, reward, info["success"]) == (True, False, 1.0, True)
    env.close()

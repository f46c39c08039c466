"""OGBench behind the environment contract: rewards and ends as its data has them, specifications, start states."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serl_chunk import extras
from serl_chunk.config.robots import OgbenchConfig
from serl_chunk.data.formats.ogbench import OgbenchSource
from serl_chunk.data.source import ReadOptions
from serl_chunk.robots import registry
from serl_chunk.robots.ogbench import ENVIRONMENTS, ogbench_spec

PLAY = Path(__file__).parents[1] / "data" / "ogbench_play.npz"  # rows of cube-single-play
STILL = np.zeros(5, np.float32)

# Looked up, not imported: how MuJoCo renders is fixed by its first import.
installed = pytest.mark.skipif(
    importlib.util.find_spec("ogbench") is None, reason="the [ogbench] extra is not installed"
)
pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def env() -> Any:
    env = registry.make_env(OgbenchConfig())
    yield env
    env.close()


def name_of(environment: str, task: int = 1) -> str:
    return f"{environment}-play-singletask-task{task}-v0"


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

"""robomimic's tasks behind the environment contract: against a stand-in for robosuite, and robosuite where it is."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
from errors import naming
from robosuite_stand_in import stand_in

from serl_chunk.config.robots import RobomimicConfig
from serl_chunk.data.formats import robomimic as files
from serl_chunk.robots import registry
from serl_chunk.robots.robomimic import STATE_KEYS, TASKS, robomimic_spec
from serl_chunk.types import DataError

installed = pytest.mark.skipif(
    importlib.util.find_spec("robosuite") is None, reason="the [robomimic] extra is not installed"
)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return stand_in(monkeypatch)


def test_it_makes_the_published_simulation_in_the_order_of_the_data(made: dict[str, Any]) -> None:
    recorded = [key for key in files.STATE_KEYS if not key.startswith("robot1")]
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


def test_a_seed_leaves_numpys_generator_alone(made: dict[str, Any]) -> None:
    env = registry.make_env(RobomimicConfig())
    np.random.seed(5)  # noqa: NPY002
    expected = np.random.uniform()  # noqa: NPY002
    np.random.seed(5)  # noqa: NPY002
    starts = [env.reset(seed=s)[0]["state"][-1] for s in (1, 2, 1, None, None)]
    assert np.random.uniform() == expected  # noqa: NPY002
    assert starts[0] == starts[2]
    assert len(set(starts)) == 4


@installed
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

"""States, parameters and run folders that commit 2514010 wrote are read under the names of today.

`tests/data/2514010/README.md` says how the folders were made.
"""

from __future__ import annotations

import dataclasses
import json
import re
import tarfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_tools import build, config_of, make_batches, same
from errors import naming
from flax.traverse_util import flatten_dict
from small_bases import FROZEN, experiment, use_small_backbones, write_weights

from serl_chunk.agents.base import Agent
from serl_chunk.agents.former import Learned, current_leaves, current_params
from serl_chunk.cli.demos import RunOptions
from serl_chunk.cli.learner import build_learner
from serl_chunk.learner.learner import Learner
from serl_chunk.robots.registry import robot_spec
from serl_chunk.runs.checkpoints import CheckpointStore, host_leaves
from serl_chunk.runs.folder import open_run
from serl_chunk.types import ConfigError

FILES = Path(__file__).parents[1] / "data" / "2514010"
ENCODER = {"images": FROZEN, "states": None}


@pytest.fixture(autouse=True)
def small_backbone(monkeypatch):
    use_small_backbones(monkeypatch)


def agent_of(variant: str, weights: str = "", **changes) -> Agent:
    config = config_of(variant, **changes)
    if config.image_keys:
        config = dataclasses.replace(config, encoder=dataclasses.replace(FROZEN, weights=weights))
    return build(config)


def learned(agent: Agent) -> Learned:
    """A state and the base of the same run."""
    return Learned(agent.init(jax.random.key(0)), agent.new_base(jax.random.key(1)))


def former_leaves(it: Learned) -> dict[str, np.ndarray]:
    """A checkpoint's leaves as 2514010 named them, with the average that it kept where nothing was averaged."""
    out = {}
    for path, leaf in host_leaves(it).items():
        name = path.removeprefix(".state")
        out[re.sub(r"^\.base\['backbone'\]", ".frozen", name)] = leaf
    if not it.state.policy_average:
        copies = {path: leaf for path, leaf in out.items() if path.startswith(".policy[")}
        out |= {path.replace(".policy[", ".policy_average["): leaf for path, leaf in copies.items()}
    return out


def shapes_of(agent: Agent) -> Learned:
    """What a learner restores: a base only where it has no source."""
    return jax.eval_shape(lambda: learned(agent)._replace(**({"base": {}} if agent.source else {})))


@pytest.mark.parametrize("variant", ["bc-gaussian", "bc-gaussian-image", "acrlpd"])
@pytest.mark.parametrize("average", [0.0, 0.9])
def test_leaves_of_a_former_state_are_those_of_today(variant, average):
    agent = agent_of(variant, policy_ema=average)
    it = learned(agent)
    former = former_leaves(it)
    assert ".rng" in former
    assert any(path.startswith(".policy_average[") for path in former)
    assert any(path.startswith(".frozen[") for path in former) == ("image" in variant)
    current = current_leaves(former, shapes_of(agent), {})
    expected = host_leaves(it)
    assert current.keys() == expected.keys()
    for path, leaf in expected.items():
        np.testing.assert_array_equal(current[path], leaf, err_msg=path)
    assert current_leaves(expected, shapes_of(agent), {}) == expected  # those of today stay


def test_a_former_base_with_a_source_is_compared_with_the_file_and_left_out(tmp_path):
    agent = agent_of("bc-gaussian-image", write_weights(tmp_path / "w.npz"))
    it = learned(agent)
    current = current_leaves(former_leaves(it), shapes_of(agent), agent.source_base)
    assert current.keys() == host_leaves(Learned(it.state, {})).keys()
    other = agent_of("bc-gaussian-image", write_weights(tmp_path / "other.npz", seed=1))
    with pytest.raises(ConfigError, match=naming("agent.encoder.weights")) as refused:
        current_leaves(former_leaves(it), shapes_of(other), other.source_base)
    assert refused.value.parameter == "agent.encoder.weights"


@pytest.mark.parametrize(("candidates", "trusted"), [(0, True), (1, False)])
def test_former_parameters_are_loaded(tmp_path, candidates, trusted):
    for weights in ("", write_weights(tmp_path / "w.npz")):
        agent = agent_of("acrlpd-image", weights)
        state, base = learned(agent)
        published = agent.published(state, base) | {"trusted": np.asarray(trusted)}
        flat = agent.flatten_params({k: v for k, v in published.items() if k not in ("base", "trusted")})
        former = {
            **flat,
            "candidates": np.asarray(candidates, np.int32),
            **{f"frozen/{name}": np.asarray(leaf) for name, leaf in flatten_dict(base["backbone"], sep="/").items()},
        }
        assert current_params(former, has_source=bool(weights)).keys() == agent.flatten_params(published).keys()
        assert same(agent.load_params(former), jax.tree.map(jnp.asarray, published | {"base": base}))


@pytest.fixture(params=sorted(ENCODER))
def former_run(request, tmp_path) -> tuple[str, Path]:
    run = tmp_path / request.param
    with tarfile.open(FILES / f"{request.param}.tar.xz") as tar:
        tar.extractall(run, filter="data")
    return request.param, run


def resumed(name: str, run: Path) -> Learner:
    config = experiment(ENCODER[name], max_steps=16, policy_ema=0.0 if name == "images" else 0.9)
    spec = robot_spec(config.robot)
    return build_learner(
        config, RunOptions([]), open_run(config, spec, str(run)), spec,
        publish=lambda snapshot, info: None, threaded=False,
    )  # fmt: skip


def test_a_run_folder_goes_on_where_it_ended(former_run):
    name, run = former_run
    expected = json.loads((run / "expected.json").read_text())
    learner = resumed(name, run)
    agent, state, base = learner.agent, learner.state, learner.base
    assert learner.updates == 8
    assert np.asarray(jax.random.key_data(state.rng)).tolist() == expected["rng"]
    counted = (int(state.critic_updates), int(state.policy_updates))
    assert counted == (expected["critic_updates"], expected["policy_updates"])
    assert bool(state.policy_average) == (name == "states")
    assert bool(base) == (name == "images")

    observation = {"state": np.linspace(-1, 1, agent.spec.state_dim, dtype=np.float32)}
    if name == "images":
        observation["images/top"] = np.arange(192, dtype=np.uint8).reshape(8, 8, 3)
    saved = CheckpointStore(run).restore_policy(8)
    for params in (agent.published(state, base), agent.load_params(saved.params)):
        chunk, record = agent.sample(params, observation, jax.random.key(0), explore=False)
        np.testing.assert_allclose(chunk, expected["chunk"], atol=1e-4)
        np.testing.assert_allclose(record["values"], expected["values"], atol=1e-4)

    batches = jax.device_put(make_batches(agent.spec))
    learner.state, metrics = agent.update(state, base, {"critic": batches})
    assert all(np.isfinite(value) for value in metrics.values())
    learner.updates += 2
    learner.checkpoint()  # of today's leaves
    learner.close()
    learner.metrics.close()
    again = resumed(name, run)
    assert same(again.state, learner.state)
    assert same(again.base, base)
    again.close()
    again.metrics.close()

"""The base: read by updates and decisions, changed by neither, and sent only where it has no source."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_tools import build, config_of, make_batches, named, on_device, same
from errors import naming
from flax.traverse_util import flatten_dict
from small_bases import FROZEN, experiment, use_small_backbones, write_weights

from serl_chunk.agents.base import Agent
from serl_chunk.agents.vision import digest_of
from serl_chunk.cli.learner import make_learner
from serl_chunk.config.compatibility import contract
from serl_chunk.learner.building import RunOptions
from serl_chunk.learner.learner import Learner
from serl_chunk.robots.registry import robot_spec
from serl_chunk.runs.checkpoints import read_item
from serl_chunk.runs.folder import open_run
from serl_chunk.transport.wire.handshake import compare
from serl_chunk.types import ConfigError, Snapshot

WIDE = 48  # channels: such a base is larger than all that the small networks write


@pytest.fixture(autouse=True)
def small_backbone(monkeypatch):
    use_small_backbones(monkeypatch)


def agent_of(weights: str = "") -> Agent:
    encoder = dataclasses.replace(FROZEN, weights=weights)
    return build(dataclasses.replace(config_of("bc-gaussian-image"), encoder=encoder))


def seen(agent: Agent) -> dict[str, np.ndarray]:
    return {k: v[0, 0] for k, v in make_batches(agent.spec).observations.items()}


def test_a_base_with_a_source_does_not_travel_and_each_side_reads_it(tmp_path):
    agent = agent_of(write_weights(tmp_path / "w.npz"))
    state, base = agent.init(jax.random.key(0)), agent.new_base(jax.random.key(1))
    assert same(base, agent.source_base)
    with np.load(tmp_path / "w.npz") as file:
        assert all(np.array_equal(leaf, file[name]) for name, leaf in flatten_dict(base["backbone"], sep="/").items())
    published = agent.published(state, base)
    assert same(published, agent.policy_params(state))
    assert "base" not in published
    assert "base/" not in agent.network_shape()
    loaded = agent.load_params(agent.flatten_params(published))
    assert same(loaded["base"], base)
    chunks = [
        agent.sample(params, seen(agent), jax.random.key(2), explore=False)[0]
        for params in (loaded, {**published, "base": base})
    ]
    np.testing.assert_array_equal(*chunks)
    black = jax.tree.map(jnp.zeros_like, base)
    blind = agent.sample({**published, "base": black}, seen(agent), jax.random.key(2), explore=False)[0]
    assert not np.array_equal(chunks[0], blind)


def test_a_base_without_a_source_travels():
    agent = agent_of()
    state, base = agent.init(jax.random.key(0)), agent.new_base(jax.random.key(1))
    assert agent.base_digest == ""
    published = agent.published(state, base)
    assert same(published, agent.policy_params(state) | {"base": base})
    assert same(agent.load_params(agent.flatten_params(published)), published)
    assert "base/backbone/" in agent.network_shape()
    assert not same(base, agent.new_base(jax.random.key(2)))


def test_without_a_backbone_there_is_no_base():
    agent = build(config_of("bc-gaussian"))
    assert (agent.new_base(jax.random.key(0)), agent.base_digest, agent.source) == ({}, "", "")
    assert "base" not in agent.published(agent.init(jax.random.key(0)), {})


def test_a_digest_is_of_the_numbers_names_and_shapes_and_not_of_the_file(tmp_path):
    first = agent_of(write_weights(tmp_path / "a.npz"))
    assert agent_of(write_weights(tmp_path / "b.npz")).base_digest == first.base_digest
    assert agent_of(write_weights(tmp_path / "c.npz", seed=1)).base_digest != first.base_digest
    tree = {"a": {"b": np.arange(6, dtype=np.float32), "c": np.zeros(2, np.float32)}}
    digest = digest_of(tree)
    assert len(digest) == 16
    assert digest_of({"a": dict(reversed(tree["a"].items()))}) == digest
    one = tree["a"]["b"].copy()
    one[3] = np.nextafter(one[3], 9, dtype=np.float32)
    for other in (
        {"a": {**tree["a"], "b": one}},
        {"a": {**tree["a"], "b": tree["a"]["b"].reshape(2, 3)}},
        {"a": {**tree["a"], "b": tree["a"]["b"].astype(np.float64)}},
        {"d": tree["a"]},
    ):
        assert digest_of(other) != digest
    assert digest_of({}) == ""


def test_no_update_consumes_or_changes_the_base():
    agent = agent_of()
    state, base = agent.init(jax.random.key(0)), agent.new_base(jax.random.key(1))
    before = jax.tree.map(np.array, base)
    for update in (agent.update, agent.update_policy):
        batches = on_device(agent.spec)
        state, _ = update(state, base, named(agent, batches) if update is agent.update else batches)
    assert same(jax.tree.map(np.asarray, base), before)
    assert not same(jax.tree.map(np.asarray, agent.new_base(jax.random.key(2))), before)


def test_a_difference_is_named_when_an_actor_connects():
    config = experiment(FROZEN)
    spec = robot_spec(config.robot)
    mine, theirs = (contract(config, spec, "net", base=digest) for digest in ("0123456789abcdef", "fedcba9876543210"))
    refusal = compare(mine, theirs)
    assert "0123456789abcdef" in refusal
    assert "fedcba9876543210" in refusal
    assert "base" in refusal
    assert compare(mine, contract(config, spec, "net", base="0123456789abcdef")) == ""
    assert "base" not in contract(config, spec, "net")


def learner_of(weights: str, run: Path, sent: list[Snapshot]) -> Learner:
    config = experiment(dataclasses.replace(FROZEN, weights=weights))
    spec = robot_spec(config.robot)
    return make_learner(
        config, RunOptions([]), open_run(config, spec, str(run)), spec,
        publish=lambda snapshot, info: sent.append(snapshot), threaded=False,
    )  # fmt: skip


def close(learner: Learner) -> None:
    learner.close()
    learner.metrics.close()


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


@pytest.mark.parametrize("has_source", [True, False])
def test_snapshots_and_checkpoints_hold_a_base_only_without_a_source(tmp_path, monkeypatch, has_source):
    use_small_backbones(monkeypatch, WIDE)
    sent: list[Snapshot] = []
    weights = write_weights(tmp_path / "w.npz", WIDE) if has_source else ""
    learner = learner_of(weights, tmp_path / "run", sent)
    learner.publish()
    learner.checkpoint()
    close(learner)
    nbytes = sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(learner.base))
    assert nbytes > 250_000
    of_snapshot = sum(value.nbytes for value in sent[-1].params.values())
    assert [name for name in sent[-1].params if name.startswith("base/")] == [] if has_source else of_snapshot > nbytes
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    leaves, meta = read_item(checkpoint, "state")
    assert any(path.startswith(".base") for path in leaves) != has_source
    assert (size_of(checkpoint) > nbytes) != has_source
    if has_source:
        assert of_snapshot < nbytes / 4
        assert meta["base_digest"] == learner.agent.base_digest
    again = learner_of(weights, tmp_path / "run", sent)
    assert same(again.base, learner.base)
    assert same(again.state, learner.state)
    close(again)


def test_a_run_does_not_go_on_with_another_base(tmp_path):
    run, sent = tmp_path / "run", []
    learner = learner_of(write_weights(tmp_path / "w.npz"), run, sent)
    learner.checkpoint()
    close(learner)
    other = write_weights(tmp_path / "w.npz", seed=1)  # the same name with other weights
    digest = build(learner.config.agent).base_digest
    assert digest != learner.agent.base_digest
    with pytest.raises(ConfigError, match=naming(other, learner.agent.base_digest, digest)) as refused:
        learner_of(other, run, sent)
    assert refused.value.parameter == "agent.encoder.weights"

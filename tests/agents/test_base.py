"""The base: read by updates and decisions, changed by neither, and sent only where it has no source."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_tools import build, config_of, drawn, made, make_batches, named, same, seen_by
from errors import naming
from flax.traverse_util import flatten_dict
from learner_tools import learner_of, let_go
from small_bases import FROZEN, experiment, use_small_backbones, write_weights

from serl_chunk.agents.base import Agent
from serl_chunk.agents.vision import digest_of
from serl_chunk.config.compatibility import contract
from serl_chunk.learner.learner import Learner
from serl_chunk.robots.registry import robot_spec
from serl_chunk.runs.checkpoints import read_item
from serl_chunk.transport.wire.handshake import compare
from serl_chunk.types import ConfigError, Snapshot

WIDE = 48  # channels: such a base is larger than all that the small networks write


@pytest.fixture(autouse=True)
def small_backbone(monkeypatch):
    use_small_backbones(monkeypatch)


def agent_of(weights: str = "") -> Agent:
    return build(config_of("bc-gaussian-image", encoder=dataclasses.replace(FROZEN, weights=weights)))


def test_a_base_with_a_source_does_not_travel_and_each_side_reads_it(tmp_path):
    agent = agent_of(write_weights(tmp_path / "w.npz"))
    state, base = drawn(agent), agent.new_base(jax.random.key(1))
    assert same(base, agent.source_base)
    with np.load(tmp_path / "w.npz") as file:
        assert all(np.array_equal(leaf, file[name]) for name, leaf in flatten_dict(base["backbone"], sep="/").items())
    published = agent.published(state, base)
    assert same(published, agent.policy_params(state))
    assert "base" not in published
    assert "base/" not in agent.network_shape()
    loaded = agent.load_params(agent.flatten_params(published))
    assert same(loaded["base"], base)
    chunk, here, blind = (
        agent.sample(params, seen_by(agent), jax.random.key(2), explore=False)[0]
        for params in (loaded, {**published, "base": base}, {**published, "base": jax.tree.map(jnp.zeros_like, base)})
    )
    np.testing.assert_array_equal(chunk, here)
    assert not np.array_equal(chunk, blind)


def test_a_base_without_a_source_travels_and_no_update_consumes_or_changes_it():
    agent = agent_of()
    new_base = jax.jit(agent.new_base)
    state, base = drawn(agent), new_base(jax.random.key(1))
    before = jax.tree.map(np.array, base)
    published = agent.published(state, base)
    assert (agent.base_digest, published.keys()) == ("", {"policy", "base"})
    assert same(published, agent.policy_params(state) | {"base": base})
    assert same(agent.load_params(agent.flatten_params(published)), published)
    assert "base/backbone/" in agent.network_shape()
    assert not same(base, new_base(jax.random.key(2)))
    agent.update(state, base, named(agent, make_batches(agent.spec)))
    assert same(base, before)
    without = made("bc-gaussian")
    assert (without.new_base(jax.random.key(0)), without.base_digest, without.source) == ({}, "", "")
    assert "base" not in without.published(drawn(without), {})


def test_a_digest_is_of_the_numbers_names_and_shapes_and_not_of_the_file(tmp_path):
    digests = [
        agent_of(write_weights(tmp_path / name, seed=seed)).base_digest
        for name, seed in (("a.npz", 0), ("b.npz", 0), ("c.npz", 1))
    ]
    assert digests[0] == digests[1] != digests[2]
    tree = {"a": {"b": np.arange(6, dtype=np.float32), "c": np.zeros(2, np.float32)}}
    digest = digest_of(tree)
    assert len(digest) == 16
    assert digest_of({"a": dict(reversed(tree["a"].items()))}) == digest
    b = tree["a"]["b"]
    nearly = np.where(np.arange(6) == 3, np.nextafter(b, np.float32(9)), b)
    others = [{"a": {**tree["a"], "b": other}} for other in (nearly, b.reshape(2, 3), b.astype(np.float64))]
    assert digest not in {digest_of(other) for other in (*others, {"d": tree["a"]})}
    assert digest_of({}) == ""


def test_a_difference_is_named_when_an_actor_connects():
    config = experiment(FROZEN)
    of = lambda digest="": contract(config, robot_spec(config.robot), "net", base=digest)  # noqa: E731
    refusal = compare(of("0123456789abcdef"), of("fedcba9876543210"))
    assert all(word in refusal for word in ("base", "0123456789abcdef", "fedcba9876543210"))
    assert compare(of("0123456789abcdef"), of("0123456789abcdef")) == ""
    assert "base" not in of()


def learner(weights: str, run: Path, sent: list[Snapshot]) -> Learner:
    config = experiment(dataclasses.replace(FROZEN, weights=weights))
    return learner_of(config, None, run, publish=lambda snapshot, info: sent.append(snapshot))


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


@pytest.mark.parametrize("has_source", [True, False])
def test_snapshots_and_checkpoints_hold_a_base_only_without_a_source(tmp_path, monkeypatch, has_source):
    use_small_backbones(monkeypatch, WIDE)
    sent: list[Snapshot] = []
    weights = write_weights(tmp_path / "w.npz", WIDE) if has_source else ""
    first = learner(weights, tmp_path / "run", sent)
    first.publish()
    first.checkpoint()
    let_go(first)
    nbytes = sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(first.base))
    assert nbytes > 250_000
    of_snapshot = sum(value.nbytes for value in sent[-1].params.values())
    assert any(name.startswith("base/") for name in sent[-1].params) != has_source
    assert of_snapshot < nbytes / 4 if has_source else of_snapshot > nbytes
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    leaves, meta = read_item(checkpoint, "state")
    assert any(path.startswith(".base") for path in leaves) == (size_of(checkpoint) > nbytes) != has_source
    assert not has_source or meta["base_digest"] == first.agent.base_digest
    again = learner(weights, tmp_path / "run", sent)
    assert same((again.base, again.state), (first.base, first.state))
    let_go(again)


def test_a_run_does_not_go_on_with_another_base(tmp_path):
    first = learner(write_weights(tmp_path / "w.npz"), tmp_path / "run", [])
    first.checkpoint()
    let_go(first)
    other = write_weights(tmp_path / "w.npz", seed=1)  # the same name with other weights
    digest = build(first.config.agent).base_digest
    assert digest != first.agent.base_digest
    with pytest.raises(ConfigError, match=naming(other, first.agent.base_digest, digest)) as refused:
        learner(other, tmp_path / "run", [])
    assert refused.value.parameter == "agent.encoder.weights"

"""Micro-batches: whatever their number, gradients, states and metrics are those of the whole batch."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_tools import ENCODER, PREFIX, build, config_of, fresh, make_batches, named

from serl_chunk.agents.base import Agent
from serl_chunk.agents.spec import agent_spec
from serl_chunk.config.agents.gripper import GripperConfig, SacGripperConfig
from serl_chunk.config.loader import load_experiment
from serl_chunk.robots.registry import robot_spec
from serl_chunk.types import ChunkBatch

CHOICES = {"choices": (-1.0, 1.0), "hold_steps": 1, "penalty": -0.1}
GRIPPER = GripperConfig(**CHOICES, joint=False)
# name -> variant, changes of the configuration, and "dims" or "shift" for batches with these
CASES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "expectile": ("acfql", {}, ()),
    "prefix": ("decoupled-lengths", {}, ()),
    "average": ("acfql", {"policy_ema": 0.9}, ()),
    "published, best of N": ("published", {}, ()),
    "published, distilled": ("published-distill", {}, ("dims",)),
    "published, Gaussian": ("published-gaussian", {}, ("dims",)),
    "the critic's encoder": ("acfql-image", {"encoder": dataclasses.replace(ENCODER, trained_by="critic")}, ()),
    "entropy": ("acrlpd-entropy", {"bc_alpha": 0.0}, ()),
    "entropy and imitation": ("acrlpd-entropy", {"bc_alpha": 0.5, "log_prob": "sum"}, ()),
    "clone, flow": ("bc", {}, ()),
    "clone, Gaussian": ("bc-gaussian", {}, ()),
    "learned gripper": ("acfql", {"gripper": GRIPPER}, ()),
    "learned gripper, Gaussian": ("acrlpd", {"gripper": SacGripperConfig(**CHOICES)}, ("dims",)),
    "learned gripper, clone": ("bc", {"gripper": GRIPPER}, ("dims", "shift")),
    "numbers": ("acfql", {}, ("dims",)),
    "numbers, Gaussian": ("acrlpd", {}, ("dims",)),
    "numbers, clone": ("bc-gaussian", {}, ("dims",)),
    "joint noise": ("acfql", {}, ("shift",)),
    "joint noise, Gaussian": ("acrlpd", {}, ("shift",)),
    "joint noise, clone": ("bc", {}, ("dims", "shift")),
}
OFTEN = ("prefix", "learned gripper", "joint noise, Gaussian")
WITH_IMAGES = ("the critic's encoder",)  # pixels become float32
every = pytest.mark.parametrize("name", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.slow) for n in CASES])


def agent_of(name: str, micro_batches: int) -> Agent:
    variant, changes, _ = CASES[name]
    sizes: dict[str, Any] = PREFIX if variant == "decoupled-lengths" else {}
    if "gripper" in changes:
        sizes = {"actions": 3, "grippers": (1,)}
    return build(config_of(variant, **changes), micro_batches=micro_batches, **sizes)


def batch_of(name: str, agent: Agent) -> ChunkBatch:
    """Windows of very different imitation weights: the first quarter has none at all."""
    rng, more = np.random.default_rng(7), CASES[name][2]
    batch = jax.tree.map(lambda x: x[0], make_batches(agent.spec))
    random = lambda shape: rng.uniform(size=shape).astype(np.float32)  # noqa: E731
    bc_weight = batch.valid * random(batch.valid.shape)
    bc_weight[:2] = 0
    changes = {"bc_weight": bc_weight, "weight": random(batch.weight.shape), "prev_action": -batch.actions[:, 0]}
    if "dims" in more:
        changes["bc_dims"] = (random(batch.actions.shape) < 0.6).astype(np.float32)
    if "shift" in more:
        changes["bc_state_shift"] = random(batch.observations["state"].shape)
        changes["bc_action_shift"] = random(batch.actions.shape)
    return batch._replace(**changes)


def in_double(tree: Any) -> Any:
    double = lambda x: x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x  # noqa: E731
    return jax.tree.map(double, tree)


def stepped(name: str, parts: tuple[int, ...], *, double: bool) -> list[Any]:
    """The state and the metrics after one step of both halves, for each number of micro-batches.

    The first moments in the optimisers' states are the gradients, times a constant.
    """
    agent = agent_of(name, 1)
    state, batch = jax.jit(agent.init)(jax.random.key(0)), batch_of(name, agent)
    key = jax.random.key(1)
    draws = {"policy": agent.policy_draws(key, batch)}
    if agent.has_critic:
        draws["critic"] = agent.critic_draws(key, batch)
    if double:
        state, batch, draws = in_double((state, batch, draws))
    # A target that is its critic would hide which of the two is read.
    state = state.replace(target=jax.tree.map(lambda x: 1.5 * x, state.target))
    out = []
    for micro_batches in parts:
        cut = agent_of(name, micro_batches)
        after, metrics = jax.jit(lambda s, b, d, cut=cut: cut.step(s, {}, b, d))(state, batch, draws)
        out.append((after.replace(rng=()), metrics))
    return out


def assert_close(got: Any, expected: Any, rtol: float) -> None:
    """Leaf by leaf, relative to the leaf's norm."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True)
    for (path, a), b in pairs:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= rtol * np.linalg.norm(b), jax.tree_util.keystr(path)


@every
def test_micro_batches_add_up_to_the_whole_batch(name):
    whole, halves, quarters = stepped(name, (1, 2, 4), double=False)
    assert_close(halves, whole, 1e-5)
    assert_close(quarters, whole, 1e-5)


@pytest.mark.parametrize(
    "name", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.slow) for n in CASES if n not in WITH_IMAGES]
)
def test_in_double_precision_nothing_but_rounding_is_left(name):
    with jax.enable_x64(True):
        whole, halves, quarters = stepped(name, (1, 2, 4), double=True)
        assert all(x.dtype == jnp.float64 for x in jax.tree.leaves((whole[0].policy, whole[0].critic)))
    assert_close(halves, whole, 1e-12)
    assert_close(quarters, whole, 1e-12)


def test_a_whole_update_of_micro_batches_compiles_once():
    whole, state = fresh("acrlpd")
    cut = build(config_of("acrlpd"), micro_batches=2)
    batches = jax.device_put(make_batches(whole.spec))
    expected, as_whole = whole.update(jax.tree.map(jnp.copy, state), {}, named(whole, batches))
    got, metrics = cut.update(state, {}, named(cut, batches))
    assert_close(metrics, as_whole, 1e-4)
    assert_close((got.policy, got.critic), (expected.policy, expected.critic), 1e-3)
    cut.update(got, {}, named(cut, batches))
    assert cut.update._cache_size() == 1


def test_the_learners_setting_is_the_number_of_micro_batches():
    config = load_experiment("fake_aloha")
    for k in (1, 4):
        chosen = dataclasses.replace(config, learner=dataclasses.replace(config.learner, accumulate=k))
        assert agent_spec(chosen, robot_spec(config.robot)).micro_batches == k

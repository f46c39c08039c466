"""Micro-batches: whatever their number, gradients, states and metrics are those of the whole batch."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_tools import ENCODER, drawn, made, one_batch

from serl_chunk.agents.base import Agent
from serl_chunk.config.agents.gripper import GripperConfig
from serl_chunk.types import ChunkBatch

CHOICES = {"choices": (-1.0, 1.0), "hold_steps": 1, "penalty": -0.1}
GRIPPER = GripperConfig(**CHOICES, joint=False)
# name -> variant, changes of the configuration, and "dims" or "shift" for batches with these
CASES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "prefix": ("decoupled-lengths", {}, ()),
    "published, best of N": ("published", {}, ()),
    "the critic's encoder": ("acfql-image", {"encoder": dataclasses.replace(ENCODER, trained_by="critic")}, ()),
    "entropy and imitation": ("acrlpd-entropy", {"bc_alpha": 0.5, "log_prob": "sum"}, ()),
    "learned gripper": ("acfql", {"gripper": GRIPPER}, ()),
    "learned gripper, clone": ("bc", {"gripper": GRIPPER}, ("dims", "shift")),
    "joint noise, Gaussian": ("acrlpd", {}, ("shift",)),
}
SINGLE_ONLY = ("the critic's encoder",)  # pixels become float32
ROWS = [("learned gripper", True, (1, 4))] + [
    pytest.param(name, double, (1, 2, 4), marks=pytest.mark.slow)
    for name in CASES
    for double in (False, True)
    if not (double and name in SINGLE_ONLY)
]


def agent_of(name: str, micro_batches: int) -> Agent:
    variant, changes, _ = CASES[name]
    sizes = {"actions": 3, "grippers": (1,)} if "gripper" in changes else {}
    return made(variant, {**sizes, "micro_batches": micro_batches}, **changes)


def batch_of(name: str, agent: Agent) -> ChunkBatch:
    """Windows of very different imitation weights: the first quarter has none at all."""
    rng, more, batch = np.random.default_rng(7), CASES[name][2], one_batch(agent)
    random = lambda x: rng.uniform(size=x.shape).astype(np.float32)  # noqa: E731
    bc_weight = batch.valid * random(batch.valid)
    bc_weight[:2] = 0
    changes = {"bc_weight": bc_weight, "weight": random(batch.weight), "prev_action": -batch.actions[:, 0]}
    if "dims" in more:
        changes["bc_dims"] = (random(batch.actions) < 0.6).astype(np.float32)
    if "shift" in more:
        state = batch.observations["state"]
        changes |= {"bc_state_shift": random(state), "bc_action_shift": random(batch.actions)}
    return batch._replace(**changes)


def in_double(tree: Any) -> Any:
    double = lambda x: x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x  # noqa: E731
    return jax.tree.map(double, tree)


def assert_close(got: Any, expected: Any, rtol: float) -> None:
    """Leaf by leaf, relative to the leaf's norm."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True)
    for (path, a), b in pairs:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= rtol * np.linalg.norm(b), jax.tree_util.keystr(path)


@pytest.mark.parametrize(("name", "double", "parts"), ROWS)
def test_micro_batches_add_up_to_the_whole_batch(name, double, parts):
    """After one step; the first moments in the optimisers' states are the gradients, times a constant.

    In double precision nothing but rounding is left.
    """
    agent, key = agent_of(name, 1), jax.random.key(1)
    state, batch, out = drawn(agent), batch_of(name, agent), []
    make = {"policy": agent.policy_draws} | ({"critic": agent.critic_draws} if agent.has_critic else {})
    draws = {half: draw(key, batch) for half, draw in make.items()}
    with jax.enable_x64(double), jax.numpy_dtype_promotion("standard"):  # powers of the discount are float32
        if double:
            state, batch, draws = in_double((state, batch, draws))
        for micro_batches in parts:
            cut = agent_of(name, micro_batches)
            after, metrics = jax.jit(lambda s, b, d, cut=cut: cut.step(s, {}, b, d))(state, batch, draws)
            out.append((after.replace(rng=()), metrics))
        if double:
            assert all(x.dtype == jnp.float64 for x in jax.tree.leaves((out[0][0].policy, out[0][0].critic)))
    for other in out[1:]:  # rounding may turn a sign, and Adam first steps by the sign
        assert_close(other, out[0], 1e-12 if double else 1e-4)

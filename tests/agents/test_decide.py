"""Deciding for many environments at once is deciding for each."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_tools import build, config_of, make_batches

from serl_chunk.config.agents.gripper import GripperConfig

E = 5
VARIANTS = {
    "decoupled-lengths": {"critic_steps": 5, "prefix_steps": 2},
    "published-distill-image": {},
    "acrlpd": {},
    "bc": {"grippers": (1,)},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("explore", [True, False])
def test_one_call_decides_for_each_with_its_own_key_and_committed_actions(variant, explore):
    sizes = VARIANTS[variant]
    changes = {"gripper": GripperConfig(choices=(-1.0, 1.0), hold_steps=1)} if "grippers" in sizes else {}
    agent = build(config_of(variant, **changes), **sizes)
    params = agent.policy_params(agent.init(jax.random.key(0)))
    observations = {k: v[0, :E] for k, v in make_batches(agent.spec).observations.items()}
    keys = jax.random.split(jax.random.key(1), E)
    rng = np.random.default_rng(0)
    mask = (np.arange(agent.spec.horizon) < rng.integers(0, 3, (E, 1))).astype(np.float32)
    committed = rng.uniform(-1, 1, (E, agent.spec.horizon, agent.spec.action_dim)).astype(np.float32), mask
    alone = rng.integers(0, 2, E).astype(bool)
    assert len(set(alone)) == 2
    chunks, record = agent.decide(params, observations, keys, explore=explore, committed=committed, alone=alone)
    assert chunks.shape == (E, agent.spec.horizon, agent.spec.action_dim)
    for i in range(E):
        one = {k: jnp.asarray(v[i]) for k, v in observations.items()}
        given = committed[0][i], committed[1][i]
        chunk, of_one = agent.sample(params, one, keys[i], explore=explore, committed=given, alone=alone[i])
        np.testing.assert_allclose(chunks[i], chunk, atol=1e-5)
        assert set(record) == set(of_one)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), {k: record[k][i] for k in record}, of_one
        )


def test_nothing_committed_is_the_default():
    agent = build(config_of("bc"))
    params = agent.policy_params(agent.init(jax.random.key(0)))
    observations = {k: v[0, :E] for k, v in make_batches(agent.spec).observations.items()}
    chunks, _ = agent.decide(params, observations, jax.random.split(jax.random.key(1), E), explore=False)
    one, _ = agent.sample(params, {k: v[2] for k, v in observations.items()}, jax.random.key(9), explore=False)
    np.testing.assert_allclose(chunks[2], one, atol=1e-5)

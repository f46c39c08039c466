"""Windows of which some numbers of an action are imitated, and others of the same action are not (`bc_dims`)."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from agent_tools import (
    PREFIX,
    build,
    config_of,
    imitation_gradient,
    make_batches,
    marked_numbers,
    named,
    one_batch,
    output_bias,
)

from serl_chunk.agents.state import Context
from serl_chunk.config.agents.flow import FlowConfig


@pytest.mark.parametrize("variant", ["bc", "bc-gaussian", "acfql", "acrlpd"])
@pytest.mark.parametrize("marked", [0, 1])
def test_what_is_not_marked_moves_no_output(variant, marked):
    agent = build(config_of(variant))
    state = agent.init(jax.random.key(0))
    _, grads = imitation_gradient(agent, state, one_batch(agent, bc_dims=marked_numbers(agent.spec, marked)))
    bias = output_bias(grads, agent)
    assert bias[:, marked].all()
    assert not bias[:, 1 - marked].any()
    _, whole = imitation_gradient(agent, state, one_batch(agent))
    assert output_bias(whole, agent).all()


@pytest.mark.parametrize("variant", ["bc", "bc-gaussian", "decoupled", "acrlpd"])
def test_all_numbers_marked_are_what_no_marks_are(variant):
    agent = build(config_of(variant), **(PREFIX if variant == "decoupled" else {}))
    state = agent.init(jax.random.key(0))
    plain = imitation_gradient(agent, state, one_batch(agent))
    marked = imitation_gradient(agent, state, one_batch(agent, bc_dims=marked_numbers(agent.spec, 0, 1)))
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(marked), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_a_gaussian_imitates_the_marked_numbers_by_likelihood():
    agent = build(config_of("bc-gaussian"))
    state, dims = agent.init(jax.random.key(0)), marked_numbers(agent.spec, 0, 1)
    dims[0, :, 1, 0] = 0
    batch = one_batch(agent, bc_dims=dims)
    loss, _ = imitation_gradient(agent, state, batch)
    dist = agent.net.distribution(state.policy["net"], Context(batch.observations["state"]))
    log_prob = dist.log_prob(batch.actions.reshape(8, 6))
    marked = (np.asarray(batch.bc_weight)[..., None] * dims[0]) > 0
    assert marked.sum() == 8 * 2 + 6 * 1 + 6 * 2  # two of eight windows have one step
    assert float(loss) == pytest.approx(-float(np.asarray(log_prob).reshape(8, 3, 2)[marked].mean()), abs=1e-5)


def test_committed_actions_of_a_delay_keep_no_weight():
    agent = build(config_of("bc", flow=FlowConfig(hidden=(16,), steps=2, train_delay="recorded")))
    state = agent.init(jax.random.key(0))
    batch = one_batch(agent, bc_dims=marked_numbers(agent.spec, 0), delay=np.full((2, 8), 1, np.int32))
    _, grads = imitation_gradient(agent, state, batch)
    bias = output_bias(grads, agent)
    assert not bias[0].any()
    assert not bias[:, 1].any()
    assert bias[1:, 0].all()


@pytest.mark.parametrize("variant", ["published", "published-gaussian"])
def test_published_agents_imitate_every_number(variant):
    agent = build(config_of(variant))
    state = agent.init(jax.random.key(0))
    plain, _ = imitation_gradient(agent, state, one_batch(agent))
    marked, _ = imitation_gradient(agent, state, one_batch(agent, bc_dims=marked_numbers(agent.spec, 0)))
    assert float(plain) == float(marked)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["bc", "decoupled"])
def test_whole_updates_take_marks(variant):
    agent = build(config_of(variant), **(PREFIX if variant == "decoupled" else {}))
    marked = make_batches(agent.spec)._replace(bc_dims=marked_numbers(agent.spec, 1))
    for update, batches in ((agent.update, named(agent, marked)), (agent.update_policy, marked)):
        state, metrics = update(agent.init(jax.random.key(0)), {}, jax.device_put(batches))
        assert all(np.isfinite(v).all() for v in jax.tree.leaves((metrics, state.policy)))

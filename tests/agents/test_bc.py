"""Behaviour cloning, the averaged policy, and the noise its chunks start from."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_tools import fresh, marked_numbers, one_batch, output_bias, policy_gradient, seen_by
from plain_networks import log_density, tanh_normal

from serl_chunk.agents.perception import Perception
from serl_chunk.agents.policies.flow import ALONE, WIDEST, FlowPolicy
from serl_chunk.agents.spec import AgentSpec
from serl_chunk.agents.state import Context
from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.agents.flow import FlowConfig


def test_the_policy_that_acts_is_an_average_of_the_newest():
    agent, state = fresh("bc-delay")
    leaf = lambda tree: np.asarray(tree["flow"]["Mlp_0"]["Dense_1"]["bias"])  # noqa: E731
    average = leaf(state.policy_average)
    step = jax.jit(lambda s, b: agent._policy_steps(s, {}, b, 1, bc_only=True))
    for n in range(4):
        state, _ = step(state, one_batch(agent, n))
        keep = min(0.9, (1 + n) / (10 + n))
        average = keep * average + (1 - keep) * leaf(state.policy)
        np.testing.assert_allclose(leaf(agent.policy_params(state)["policy"]), average, atol=1e-6)
    assert not np.allclose(average, leaf(state.policy), atol=1e-7)


def flow_policy(**changes) -> FlowPolicy:
    """A policy of single actions of 4 numbers."""
    published = changes.pop("published", False)
    flow = FlowConfig(**{"hidden": (4,), "steps": 2, "spread": 0.2, **changes})
    perception = Perception(BcConfig(), AgentSpec(3, 4, 1, 1, (), 0.9))
    return FlowPolicy(flow, perception, published=published)


NOISE = [  # published, count, explores, acts alone -> the deviation of each candidate's noise
    (False, 5, True, False, np.linspace(0, WIDEST, 5)),
    (True, 5, True, False, np.ones(5)),
    (False, 1, True, False, [ALONE]),
    (False, 1, False, False, [0.0]),
    (False, 2, True, True, [ALONE, WIDEST]),
    (False, 2, False, True, [0.0, WIDEST]),
]


@pytest.mark.parametrize(("published", "count", "explore", "alone", "deviations"), NOISE)
def test_candidates_start_from_growing_noise(published, count, explore, alone, deviations):
    policy = flow_policy(published=published)

    def draw(key):
        seen = {"state": jax.random.normal(key, (3,))}
        return policy.candidate_noise(key, seen, count, explore=explore, alone=jnp.asarray(alone))

    noise = jax.jit(jax.vmap(draw))(jax.random.split(jax.random.key(0), 400))
    np.testing.assert_allclose(np.asarray(noise).std((0, 2)), deviations, rtol=0.1)


def test_without_exploration_the_noise_depends_on_the_observation_alone():
    def noise(key: int, *state: float) -> bytes:
        seen = {"state": np.array(state, np.float32)}
        return np.asarray(flow_policy().candidate_noise(jax.random.key(key), seen, 2, explore=False)).tobytes()

    assert noise(0, 1.0, 2.0) == noise(1, 1.0, 2.0)
    assert len({noise(0, 1.0, 2.0), noise(0, 1.0, 2.001), noise(0, 2.0, 1.0)}) == 3


def test_without_a_network_noise_becomes_chunks_of_the_spread():
    """The field k(t) x alone takes N(0, 1) to N(0, s^2): it is the flow of such data."""
    policy, context, noise = flow_policy(spread=0.5), Context(jnp.zeros(3)), np.eye(4, dtype=np.float32)
    shapes = jax.eval_shape(policy.init_network, jax.random.key(0), context.features)
    chunks = jax.jit(policy.sample)(jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes), context, noise)
    np.testing.assert_allclose(chunks[:, 0], 0.5 * noise, atol=1e-5)


def test_a_gaussian_clone_is_fitted_by_likelihood_and_acts_with_its_mode():
    agent, state = fresh("bc-gaussian")
    batch, dims = one_batch(agent), marked_numbers(agent.spec, 0, 1)
    mean, std = tanh_normal(state.policy["net"], batch.observations["state"])
    density = log_density(mean, std, np.arctanh(batch.actions.reshape(8, 6))).reshape(8, 3, 2)
    metrics = policy_gradient(agent, state, batch)[1]
    assert float(metrics["value"]) == pytest.approx(-density[batch.bc_weight > 0].mean(), abs=1e-5)
    dims[:, 1, 0] = 0
    metrics = policy_gradient(agent, state, batch._replace(bc_dims=dims))[1]
    marked = (batch.bc_weight[..., None] * dims) > 0
    assert float(metrics["value"]) == pytest.approx(-density[marked].mean(), abs=1e-5)
    params, observation = agent.policy_params(state), seen_by(agent)
    chosen, explored = (
        agent.sample(params, observation, jax.random.key(0), explore=explore)[0].reshape(-1)
        for explore in (False, True)
    )
    mean, _ = tanh_normal(state.policy["net"], observation["state"])
    np.testing.assert_allclose(chosen, np.tanh(mean), atol=1e-6)
    assert not np.allclose(explored, chosen, atol=1e-3)


@pytest.mark.parametrize("variant", ["decoupled-lengths", "acrlpd"])
def test_numbers_that_are_not_marked_move_no_output(variant):
    agent, state = fresh(variant)
    of = lambda *marked: policy_gradient(  # noqa: E731
        agent, state, one_batch(agent, bc_dims=marked_numbers(agent.spec, *marked)), bc_only=True
    )
    bias = output_bias(of(1)[0], agent)
    assert (bias.any(0).tolist(), bias[:, 1].all()) == ([False, True], True)
    # All numbers marked are what no marks are.
    plain = policy_gradient(agent, state, one_batch(agent), bc_only=True)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(of(0, 1)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    # Nothing to imitate means no gradient at all.
    grads, metrics = policy_gradient(
        agent, state, one_batch(agent, bc_weight=0 * one_batch(agent).bc_weight), bc_only=True
    )
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(grads))
    assert float(metrics["actor/bc_loss"]) == 0

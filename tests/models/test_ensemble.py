"""Heads one after the other give what heads side by side give, gradients too; and how heads say values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_tools import UNIT, fresh, one_batch
from plain_networks import heads, sigmoid

from serl_chunk.models import ensemble
from serl_chunk.models.ensemble import Ensemble
from serl_chunk.models.sums import mean_of
from serl_chunk.models.value_heads import critic_values, initial_bias, regression_loss

K, B, F = 5, 12, 7
HEADS = Ensemble(K, hidden=(16, 16), out=1, norm="before")
INPUTS, TARGET, OWN = (
    np.random.default_rng(i).normal(size=s).astype(np.float32) for i, s in enumerate(((B, F), B, (K, B)))
)
WEIGHT = np.linspace(0.5, 2.0, B, dtype=np.float32)
SHAPES = jax.eval_shape(lambda: HEADS.init(jax.random.key(0), INPUTS))
PARAMS = jax.tree.map(lambda x: (0.5 * np.random.default_rng(x.size).normal(size=x.shape)).astype(np.float32), SHAPES)
COSTS = (-100.0, 0.0)


def loss(tree, x, own, constants):
    def squared(output, own, constants):
        target, weight = constants
        return mean_of(weight * (output - target - own) ** 2)

    summed, outputs = HEADS.mean_loss(tree, x, squared, own, constants)
    return 3.0 * summed.mean(), outputs


def mean(tree, x, weights):
    return jnp.sum(weights * HEADS.mean(tree, x, jnp.tanh))


def both_ways(monkeypatch, compute):
    for alone in (True, False):
        monkeypatch.setattr(ensemble, "one_by_one", lambda heads, alone=alone: alone)
        yield compute()


def close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6), a, b)


def test_loss_and_gradients_are_those_of_each_head_written_out_and_equal_both_ways(monkeypatch):
    arguments = PARAMS, INPUTS, OWN, (TARGET, WEIGHT)

    def computed():
        gradient = jax.value_and_grad(lambda *a: loss(*a), argnums=(0, 1), has_aux=True)
        # Outputs carry no gradient.
        none = jax.grad(lambda tree, x: jnp.sum(loss(tree, x, OWN, (TARGET, WEIGHT))[1]), argnums=(0, 1))
        return jax.jit(lambda *a: (gradient(*a), loss(*a), none(*a[:2])))(*arguments)

    a, b = both_ways(monkeypatch, computed)
    close(a, b)
    (_, grads), (found, outputs), none = a
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(grads))
    assert not any(np.any(g) for g in jax.tree.leaves(none))
    by_hand = heads(PARAMS, INPUTS)
    np.testing.assert_allclose(outputs, by_hand, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found, 3 * np.mean(WEIGHT * (by_hand - TARGET - OWN) ** 2), rtol=1e-4)


def test_the_mean_value_and_its_gradient_are_equal_both_ways(monkeypatch):
    weights = np.linspace(-1.0, 2.0, B, dtype=np.float32)

    def computed():
        gradient = jax.value_and_grad(lambda *a: mean(*a), argnums=(0, 1))
        return jax.jit(lambda *a: (gradient(*a), mean(*a)))(PARAMS, INPUTS, weights)

    a, b = both_ways(monkeypatch, computed)
    close(a, b)
    (value, (to_params, to_inputs)), again = a
    np.testing.assert_allclose([value, again], np.sum(weights * np.tanh(heads(PARAMS, INPUTS)).mean(0)), rtol=1e-4)
    assert np.abs(to_inputs).max() > 0
    assert not any(np.any(g) for g in jax.tree.leaves(to_params))


def test_a_bounded_value_and_its_loss_are_those_of_the_unit_range_scaled():
    outputs, places = np.linspace(-4, 4, 9, dtype=np.float32), np.linspace(-0.2, 1.2, 9, dtype=np.float32)
    values = critic_values(outputs, COSTS)
    np.testing.assert_allclose(values, -100 + 100 * sigmoid(outputs), rtol=1e-4)
    scaled, plain = (
        float(regression_loss(outputs, low + (high - low) * places, (low, high)).mean()) for low, high in (COSTS, UNIT)
    )
    assert scaled == pytest.approx(plain, rel=1e-5)
    for low, high in (UNIT, COSTS):  # a fresh critic is at an eighth of the range
        value = float(critic_values(np.float32(initial_bias((low, high))), (low, high)))
        assert value == pytest.approx(low + (high - low) * 0.1192, abs=0.002 * (high - low))


def test_an_agents_critic_has_the_range_of_its_returns():
    agent, state = fresh("acfql", sizes={"value_range": (-2.0, 3.0)})
    batch = one_batch(agent)
    seen, chunk = batch.observations["state"], batch.actions.reshape(8, 6)
    values = jax.jit(agent.critic.values)(state.critic, seen, chunk)
    np.testing.assert_allclose(values, -2 + 5 * sigmoid(heads(state.critic["q"], seen, chunk)), rtol=1e-4)

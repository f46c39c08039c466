"""Heads one after the other give what heads side by side give, gradients too."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from serl_chunk.models import ensemble
from serl_chunk.models.ensemble import Ensemble
from serl_chunk.models.sums import mean_of

K, B, F = 5, 12, 7
HEADS = Ensemble(K, hidden=(16, 16), out=1, norm="before")
INPUTS = np.random.default_rng(1).normal(size=(B, F)).astype(np.float32)
TARGET = np.random.default_rng(2).normal(size=B).astype(np.float32)
OWN = np.random.default_rng(3).normal(size=(K, B)).astype(np.float32)
WEIGHT = np.linspace(0.5, 2.0, B, dtype=np.float32)
WAYS = {"one by one": True, "side by side": False}


@functools.cache
def params():
    return HEADS.init(jax.random.key(0), INPUTS)


def squared(output, own, constants):
    target, weight = constants
    return mean_of(weight * (output - target - own) ** 2)


def loss(tree, x, own, constants):
    summed, outputs = HEADS.mean_loss(tree, x, squared, own, constants)
    return 3.0 * summed.mean(), outputs


def mean(tree, x, weights):
    return jnp.sum(weights * HEADS.mean(tree, x, jnp.tanh))


def both_ways(monkeypatch, compute):
    for alone in WAYS.values():
        monkeypatch.setattr(ensemble, "one_by_one", lambda heads, alone=alone: alone)
        yield compute()


def close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6), a, b)


def test_the_mean_loss_is_that_of_each_head_written_out():
    outputs = HEADS.outputs(params(), INPUTS)
    assert outputs.shape == (K, B)
    expected = np.mean(WEIGHT * (np.asarray(outputs) - TARGET - OWN) ** 2)
    found, again = loss(params(), INPUTS, OWN, (TARGET, WEIGHT))
    np.testing.assert_allclose(found, 3 * expected, rtol=1e-5)
    close(again, outputs)


def test_loss_and_gradients_are_equal_both_ways(monkeypatch):
    def computed():
        gradient = jax.value_and_grad(lambda *a: loss(*a), argnums=(0, 1), has_aux=True)
        return jax.jit(gradient)(params(), INPUTS, OWN, (TARGET, WEIGHT)), loss(params(), INPUTS, OWN, (TARGET, WEIGHT))

    a, b = both_ways(monkeypatch, computed)
    close(a, b)
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(a[0][1]))


@pytest.mark.parametrize("alone", WAYS.values(), ids=WAYS)
def test_outputs_of_a_loss_carry_no_gradient(alone, monkeypatch):
    monkeypatch.setattr(ensemble, "one_by_one", lambda heads: alone)

    def total(tree, x):
        value, outputs = loss(tree, x, OWN, (TARGET, WEIGHT))
        return 0.0 * value + jnp.sum(outputs)

    assert not any(np.any(g) for g in jax.tree.leaves(jax.grad(total, argnums=(0, 1))(params(), INPUTS)))


def test_the_mean_value_and_its_gradient_are_equal_both_ways(monkeypatch):
    weights = jnp.linspace(-1.0, 2.0, B)

    def computed():
        gradient = jax.value_and_grad(lambda *a: mean(*a), argnums=(0, 1))
        return jax.jit(gradient)(params(), INPUTS, weights), mean(params(), INPUTS, weights)

    a, b = both_ways(monkeypatch, computed)
    close(a, b)
    (_, (to_params, to_inputs)), _ = a
    assert np.abs(to_inputs).max() > 0
    assert not any(np.any(g) for g in jax.tree.leaves(to_params))


def test_some_of_the_heads_have_the_outputs_of_these_heads():
    few = jax.tree.map(lambda leaf: leaf[np.array([3, 0])], params())
    close(HEADS.outputs(few, INPUTS), HEADS.outputs(params(), INPUTS)[np.array([3, 0])])


@pytest.mark.parametrize(("count", "backend", "expected"), [(1, "cpu", False), (2, "cpu", True), (10, "gpu", False)])
def test_only_a_cpu_goes_one_by_one(count, backend, expected, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert ensemble.one_by_one(count) is expected

"""Heads one after the other give what heads side by side give, gradients too."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from serl_chunk.models import ensemble
from serl_chunk.models.mlp import CriticEnsemble, Mlp

K, B, F = 5, 12, 7
HEAD = Mlp((16, 16), 1, "before")
ENSEMBLE = CriticEnsemble((16, 16), 1, "before", ensemble=K)
INPUTS = np.random.default_rng(1).normal(size=(B, F)).astype(np.float32)
TARGET = np.random.default_rng(2).normal(size=B).astype(np.float32)


@functools.cache
def params():
    return ENSEMBLE.init(jax.random.key(0), INPUTS)["params"]


def of_head(head, x):
    return HEAD.apply({"params": head}, x)[..., 0]


def close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6), a, b)


def test_loss_and_gradients_are_those_of_the_ensemble():
    def loss(head, x, target):
        out = of_head(head, x)
        return jnp.mean((out - target) ** 2) / K, out

    def looped(tree, x, target):
        value, outputs = ensemble.summed_loss(loss, CriticEnsemble.heads(tree), x, target)
        return 3.0 * value, outputs

    def side_by_side(tree, x, target):
        outputs = ENSEMBLE.apply({"params": tree}, x)
        return 3.0 * jnp.mean((outputs - target) ** 2), outputs

    found, expected = (
        jax.jit(jax.value_and_grad(f, argnums=(0, 1), has_aux=True))(params(), INPUTS, TARGET)
        for f in (looped, side_by_side)
    )
    close(found, expected)
    close(looped(params(), INPUTS, TARGET), side_by_side(params(), INPUTS, TARGET))  # not differentiated


def test_constants_and_outputs_carry_no_gradient():
    def loss(head, x, target):
        out = of_head(head, x)
        return jnp.mean(out * target), out

    def total(x, target):
        value, outputs = ensemble.summed_loss(loss, CriticEnsemble.heads(params()), x, target)
        return 0.0 * value + jnp.sum(outputs)

    to_inputs, to_target = jax.grad(total, argnums=(0, 1))(INPUTS, TARGET)
    assert not np.any(to_inputs)
    assert not np.any(to_target)


def test_mean_and_its_gradient_for_every_row():
    weights = jnp.linspace(-1.0, 2.0, B)

    def looped(x):
        return jnp.sum(weights * ensemble.mean_values(of_head, CriticEnsemble.heads(params()), x))

    def side_by_side(x):
        return jnp.sum(weights * jnp.mean(ENSEMBLE.apply({"params": params()}, x), axis=0))

    close(jax.jit(jax.value_and_grad(looped))(INPUTS), jax.jit(jax.value_and_grad(side_by_side))(INPUTS))
    close(looped(INPUTS), side_by_side(INPUTS))


@pytest.mark.parametrize(("count", "backend", "expected"), [(1, "cpu", False), (2, "cpu", True), (10, "gpu", False)])
def test_only_a_cpu_goes_one_by_one(count, backend, expected, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert ensemble.one_by_one(count) is expected

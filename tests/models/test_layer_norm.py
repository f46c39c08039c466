"""Layer normalisation beside flax's own."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from serl_chunk.models.mlp import LayerNorm


@pytest.mark.parametrize("shape", [(7,), (5, 7), (2, 5, 7)])
def test_values_and_gradients_are_flax_s(shape):
    keys = jax.random.split(jax.random.key(0), 4)
    x, weight = (3 * jax.random.normal(k, shape) + 2 for k in keys[:2])
    params = {"scale": jax.random.normal(keys[2], shape[-1:]), "bias": jax.random.normal(keys[3], shape[-1:])}
    ours, theirs = LayerNorm(), nn.LayerNorm()
    assert jax.tree.structure(ours.init(keys[0], x)) == jax.tree.structure(theirs.init(keys[0], x))

    def loss(module, params, x):
        return jnp.sum(weight * jnp.sin(module.apply({"params": params}, x)))

    np.testing.assert_allclose(
        ours.apply({"params": params}, x), theirs.apply({"params": params}, x), rtol=1e-5, atol=1e-6
    )
    gradient = jax.jit(jax.grad(loss, (1, 2)), static_argnums=0)
    for a, b in zip(
        jax.tree.leaves(gradient(ours, params, x)),
        jax.tree.leaves(gradient(theirs, params, x)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_under_vmap_each_head_has_its_own_parameters():
    x = jax.random.normal(jax.random.key(0), (4, 6))
    params = {"scale": jnp.arange(1.0, 4)[:, None] * jnp.ones(6), "bias": jnp.zeros((3, 6))}

    def head(module, p):
        return jnp.sum(module.apply({"params": p}, x) ** 3)

    ours = jax.jit(jax.vmap(jax.grad(lambda p: head(LayerNorm(), p))))(params)
    theirs = jax.jit(jax.vmap(jax.grad(lambda p: head(nn.LayerNorm(), p))))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), ours, theirs)


def test_a_constant_row_has_a_finite_gradient():
    """Its variance is 0, or a little less by rounding."""
    x = jnp.full((3, 8), 1e3)
    params = {"scale": jnp.ones(8), "bias": jnp.zeros(8)}
    grad = jax.grad(lambda x: jnp.sum(LayerNorm().apply({"params": params}, x) * jnp.arange(8)))(x)
    assert np.isfinite(grad).all()

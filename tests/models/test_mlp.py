"""Layers, the last bias, and the independence of an ensemble's heads."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from serl_chunk.models.mlp import CriticEnsemble, Mlp


def test_an_mlp_is_what_its_layers_compute():
    x = jnp.array([[1.0, -2.0], [0.5, 3.0]])
    params = Mlp((3,), 2).init(jax.random.key(0), x)["params"]
    first, last = params["Dense_0"], params["Dense_1"]
    hidden = np.maximum(x @ first["kernel"] + first["bias"], 0)
    np.testing.assert_allclose(
        Mlp((3,), 2).apply({"params": params}, x), hidden @ last["kernel"] + last["bias"], atol=1e-6
    )


def test_layer_norm_and_the_last_bias_are_optional():
    x = jnp.ones((1, 2))
    params = Mlp((3, 4), 1, layer_norm=True, out_bias=-2.0).init(jax.random.key(0), x)["params"]
    assert sorted(params) == ["Dense_0", "Dense_1", "Dense_2", "LayerNorm_0", "LayerNorm_1"]
    np.testing.assert_array_equal(params["Dense_2"]["bias"], [-2.0])
    assert not any(name.startswith("LayerNorm") for name in Mlp((3,), 1).init(jax.random.key(0), x)["params"])


def test_heads_of_an_ensemble_are_independent():
    features, chunk = jnp.ones((5, 3)), jnp.ones((5, 4))
    critic = CriticEnsemble((8,), 3, out_bias=0.5)
    params = critic.init(jax.random.key(0), features, chunk)["params"]
    values = critic.apply({"params": params}, features, chunk)
    assert values.shape == (3, 5)
    assert np.unique(np.asarray(values[:, 0])).size == 3  # initialised apart
    changed = jax.tree.map(lambda leaf: leaf.at[1].add(1.0), params)  # head 1 only
    after = critic.apply({"params": changed}, features, chunk)
    np.testing.assert_array_equal(after[::2], values[::2])
    assert (after[1] != values[1]).all()
    single = critic.apply({"params": params}, features[0], chunk[0])
    assert single.shape == (3,)
    np.testing.assert_allclose(single, values[:, 0], atol=1e-5)

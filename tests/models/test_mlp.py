"""Layers, the last bias, and the independence of an ensemble's heads."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from serl_chunk.models.mlp import Mlp, StackedMlp


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
    params = Mlp((3, 4), 1, norm="before", out_bias=-2.0).init(jax.random.key(0), x)["params"]
    assert sorted(params) == ["Dense_0", "Dense_1", "Dense_2", "LayerNorm_0", "LayerNorm_1"]
    np.testing.assert_array_equal(params["Dense_2"]["bias"], [-2.0])
    assert not any(name.startswith("LayerNorm") for name in Mlp((3,), 1).init(jax.random.key(0), x)["params"])


def test_the_norm_stands_before_or_after_the_activation():
    x = jnp.array([[1.0, -2.0], [0.5, 3.0]])
    for activation, function in (("relu", nn.relu), ("gelu", nn.gelu), ("tanh", nn.tanh)):
        for norm in ("before", "after"):
            net = Mlp((3,), 1, norm, activation=activation)
            params = net.init(jax.random.key(0), x)["params"]
            hidden = x @ params["Dense_0"]["kernel"]
            normed = nn.LayerNorm().apply({"params": params["LayerNorm_0"]}, function(hidden))
            if norm == "before":
                normed = function(nn.LayerNorm().apply({"params": params["LayerNorm_0"]}, hidden))
            np.testing.assert_allclose(
                net.apply({"params": params}, x), normed @ params["Dense_1"]["kernel"], atol=1e-6
            )


def test_gelu_is_its_tanh_approximation():
    x = jnp.linspace(-3, 3, 7)[:, None]
    net = Mlp((1,), 1, activation="gelu")
    one = {"kernel": jnp.ones((1, 1)), "bias": jnp.zeros(1)}
    out = net.apply({"params": {"Dense_0": one, "Dense_1": one}}, x)
    wanted = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    np.testing.assert_allclose(out, wanted, atol=1e-6)


def test_groups_of_outputs_are_drawn_like_layers_of_their_own():
    """Xavier's bound is sqrt(6 / (fan in + fan out)): of a group, not of all groups together."""
    x = jnp.ones((1, 1000))
    for blocks, bound in ((1, (6 / 1300) ** 0.5), (2, (6 / 1150) ** 0.5)):
        net = Mlp((), 300, kernel_init="xavier_uniform", out_blocks=blocks)
        kernel = np.asarray(net.init(jax.random.key(0), x)["params"]["Dense_0"]["kernel"])
        assert kernel.shape == (1000, 300)
        assert np.abs(kernel).max() == pytest.approx(bound, rel=1e-3)
        assert not np.array_equal(kernel[:, :150], kernel[:, 150:])


def test_heads_of_an_ensemble_are_independent():
    inputs = jnp.ones((5, 7))
    critic = StackedMlp((8,), 1, "before", out_bias=0.5, count=3)
    params = critic.init(jax.random.key(0), inputs)["params"]
    values = critic.apply({"params": params}, inputs)
    assert values.shape == (3, 5)
    assert np.unique(np.asarray(values[:, 0])).size == 3  # initialised apart
    changed = jax.tree.map(lambda leaf: leaf.at[1].add(1.0), params)  # head 1 only
    after = critic.apply({"params": changed}, inputs)
    np.testing.assert_array_equal(after[::2], values[::2])
    assert (after[1] != values[1]).all()
    single = critic.apply({"params": params}, inputs[0])
    assert single.shape == (3,)
    np.testing.assert_allclose(single, values[:, 0], atol=1e-5)


@pytest.mark.parametrize("hidden", [(), pytest.param((6,), marks=pytest.mark.slow), (6, 5)])
@pytest.mark.parametrize("norm", ["none", "before", "after"])
def test_what_inputs_share_may_be_given_apart(hidden, norm):
    shared, x = jax.random.normal(jax.random.key(0), (4, 1, 3)), jax.random.normal(jax.random.key(1), (4, 7, 2))
    joined = jnp.concatenate([jnp.broadcast_to(shared, (4, 7, 3)), x], axis=-1)
    for net in (Mlp(hidden, 2, norm), StackedMlp(hidden, 1, norm, count=3)):
        params = net.init(jax.random.key(2), joined)["params"]
        apart = net.init(jax.random.key(2), x, shared)["params"]
        jax.tree.map(np.testing.assert_array_equal, params, apart)  # drawn alike, too
        params = jax.tree.map(lambda leaf: leaf + 0.1, params)
        np.testing.assert_allclose(
            net.apply({"params": params}, x, shared), net.apply({"params": params}, joined), atol=1e-5
        )


def test_what_inputs_share_is_multiplied_once():
    """Five passes with equal features are cheaper by four products of the features with the first layer."""
    net, features, width = Mlp((64,), 64), 512, 64
    shared, x = jnp.ones((8, features)), jnp.ones((8, 1))
    params = net.init(jax.random.key(0), x, shared)["params"]

    def passes(*, apart: bool) -> float:
        def run(params, x, shared):
            for _ in range(5):
                given = (x[:, :1], shared) if apart else (jnp.concatenate([shared, x[:, :1]], -1),)
                x = net.apply({"params": params}, *given)
            return x

        return jax.jit(run).lower(params, x, shared).compile().cost_analysis()["flops"]

    saved = passes(apart=False) - passes(apart=True)
    assert saved == pytest.approx(4 * 2 * 8 * features * width, rel=0.02)

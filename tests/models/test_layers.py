"""Convolutions, blocks, normalisation and perceptrons are what the library's own, or plain numpy, make of them."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain_networks import gelu, mlp

from serl_chunk.models.convolutions import BLOCK_ROWS, Conv, map_blocks, max_pool, same_padding
from serl_chunk.models.mlp import LayerNorm, Mlp, StackedMlp
from serl_chunk.models.resnet import GroupNorm


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def filled(net, *inputs, seed: int = 1):
    """Random parameters, without a compilation."""
    shapes, rng = jax.eval_shape(net.init, jax.random.key(0), *inputs)["params"], np.random.default_rng(seed)
    return jax.tree.map(lambda x: (0.4 * rng.normal(size=x.shape)).astype(np.float32), shapes)


def test_every_element_comes_out_of_blocks_once_and_in_order():
    batch = 27
    tree, scale = {"a": jnp.arange(batch * 2.0).reshape(batch, 2)}, jnp.arange(batch, dtype=jnp.float32)
    out = map_blocks(lambda t, s: t["a"] * s[:, None], (tree, scale), rows=BLOCK_ROWS // 4)
    assert np.array_equal(out, tree["a"] * scale[:, None])


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="only a CPU computes in blocks")
def test_no_more_rows_than_a_block_at_once():
    seen: list[int] = []
    for count, rows in ((100, BLOCK_ROWS // 16), (3, 2 * BLOCK_ROWS)):
        map_blocks(lambda x: seen.append(len(x)) or 2 * x, (jnp.zeros(count),), rows=rows)
    assert seen == [16, 4, 1]


@pytest.mark.parametrize(
    ("size", "stride", "height", "width", "pad"), [(3, 2, 8, 7, None), (7, 2, 10, 12, ((3, 3), (3, 3)))]
)
def test_a_convolution_equals_flax_own(size, stride, height, width, pad):
    x, padding = normal(2, height, width, 3), {} if pad is None else {"padding": pad}
    ours, theirs = Conv(4, size, stride, pad), nn.Conv(4, (size, size), stride, use_bias=False, **padding)
    out = jax.jit(lambda params: [net.apply({"params": params}, x) for net in (ours, theirs)])(filled(ours, x))
    np.testing.assert_allclose(*out, atol=1e-4)


def test_the_maximum_of_windows_equals_flax_own():
    x = normal(2, 7, 10, 3) - 5  # below the zeros of a wrong padding
    np.testing.assert_array_equal(max_pool(x), nn.max_pool(x, (3, 3), (2, 2), padding="SAME"))


def test_group_normalisation_equals_flax_own_and_same_padding_puts_the_odd_zero_behind():
    x, params = normal(2, 3, 5, 8) * 3 + 1, {"scale": np.arange(8.0), "bias": np.arange(8.0) - 3}
    theirs = nn.GroupNorm(num_groups=4, epsilon=1e-5).apply({"params": params}, x)
    np.testing.assert_allclose(GroupNorm().apply({"params": params}, x), theirs, atol=1e-5)
    assert [same_padding(n, 3, stride) for n, stride in ((8, 2), (7, 2), (5, 1))] == [(0, 1), (1, 1), (1, 1)]


def test_layer_norms_values_and_gradients_are_flax_s():
    shape = (2, 5, 7)
    x, weight = 3 * normal(*shape) + 2, normal(*shape, seed=1)
    params = {"scale": normal(*shape[-1:], seed=2), "bias": normal(*shape[-1:], seed=3)}

    def loss(module, params, x):
        out = module.apply({"params": params}, x)
        return jnp.sum(weight * jnp.sin(out)), out

    (ours, of_ours), (theirs, of_theirs) = (
        jax.jit(jax.grad(lambda p, x, m=module: loss(m, p, x), (0, 1), has_aux=True))(params, x)
        for module in (LayerNorm(), nn.LayerNorm())
    )
    np.testing.assert_allclose(of_ours, of_theirs, rtol=1e-5, atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), ours, theirs)


def test_a_constant_row_has_a_finite_gradient():
    """Its variance is 0, or a little less by rounding."""
    params = {"scale": np.ones(8), "bias": np.zeros(8)}
    total = lambda x: jnp.sum(LayerNorm().apply({"params": params}, x) * np.arange(8.0)[None])  # noqa: E731
    assert np.isfinite(jax.grad(total)(np.full((3, 8), 1e3, np.float32))).all()


@pytest.mark.parametrize(
    ("norm", "activation", "function"),
    [("none", "relu", lambda x: np.maximum(x, 0)), ("before", "tanh", np.tanh), ("after", "gelu", gelu)],
)
def test_a_perceptron_is_its_layers_with_the_norm_before_or_after_the_activation(norm, activation, function):
    net, x = Mlp((3, 4), 2, norm, activation=activation), normal(5, 2)
    params = filled(net, x)
    wanted = mlp(params, x, norm=norm, activation=function)
    np.testing.assert_allclose(net.apply({"params": params}, x), wanted, atol=1e-5)
    dense, norms = {f"Dense_{i}" for i in range(3)}, {f"LayerNorm_{i}" for i in range(2)}
    assert set(params) == dense | (norms if norm != "none" else set())


@pytest.mark.parametrize(("hidden", "norm"), [((), "none"), ((6, 5), "before")])
def test_what_inputs_share_may_be_given_apart(hidden, norm):
    shared, x = normal(4, 1, 3), normal(4, 7, 2, seed=1)
    joined = np.concatenate([np.broadcast_to(shared, (4, 7, 3)), x], axis=-1)
    for net in (Mlp(hidden, 2, norm), StackedMlp(hidden, 1, norm, count=3)):

        @jax.jit
        def found(key, params, net=net):
            given = (joined,), (x, shared)
            return [net.init(key, *g) for g in given], [net.apply({"params": params}, *g) for g in given]

        params, out = found(jax.random.key(2), filled(net, joined))
        jax.tree.map(np.testing.assert_array_equal, *params)  # drawn alike, too
        np.testing.assert_allclose(*out, atol=1e-5)

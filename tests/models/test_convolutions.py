"""Convolutions over patches, pooling and normalisation are what the library's own are."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from serl_chunk.models.convolutions import Conv, max_pool, same_padding
from serl_chunk.models.resnet import GroupNorm


@pytest.mark.parametrize(
    ("size", "stride", "height", "width"), [(3, 1, 5, 6), (3, 2, 8, 7), (1, 2, 6, 5), (7, 2, 9, 8)]
)
def test_a_convolution_equals_flax_own(size, stride, height, width):
    x = jax.random.normal(jax.random.key(0), (2, height, width, 3))
    ours, theirs = Conv(4, size, stride), nn.Conv(4, (size, size), stride, use_bias=False)
    params = ours.init(jax.random.key(1), x)
    np.testing.assert_allclose(ours.apply(params, x), theirs.apply(params, x), atol=1e-4)


def test_a_convolution_with_padding_of_its_own_equals_flax():
    x = jax.random.normal(jax.random.key(0), (2, 10, 12, 3))
    pad = ((3, 3), (3, 3))
    ours, theirs = Conv(4, 7, 2, pad), nn.Conv(4, (7, 7), 2, padding=pad, use_bias=False)
    params = ours.init(jax.random.key(1), x)
    np.testing.assert_allclose(ours.apply(params, x), theirs.apply(params, x), atol=1e-4)


@pytest.mark.parametrize(("height", "width"), [(8, 8), (7, 10), (1, 2)])
def test_the_maximum_of_windows_equals_flax_own(height, width):
    x = jax.random.normal(jax.random.key(0), (2, height, width, 3)) - 5  # below the zeros of a wrong padding
    theirs = nn.max_pool(x, (3, 3), (2, 2), padding="SAME")
    np.testing.assert_array_equal(max_pool(x), theirs)


def test_group_normalisation_equals_flax_own():
    x = jax.random.normal(jax.random.key(0), (2, 3, 5, 8)) * 3 + 1
    params = {"scale": jnp.arange(8.0), "bias": jnp.arange(8.0) - 3}
    theirs = nn.GroupNorm(num_groups=4, epsilon=1e-5).apply({"params": params}, x)
    np.testing.assert_allclose(GroupNorm().apply({"params": params}, x), theirs, atol=1e-5)


def test_same_padding_puts_the_odd_zero_behind():
    assert [same_padding(n, 3, 2) for n in (8, 7)] == [(0, 1), (1, 1)]
    assert same_padding(5, 3, 1) == (1, 1)

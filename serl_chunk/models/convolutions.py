"""Convolutions, pooling and block-wise evaluation that XLA's CPU backend does not compute in scalar loops.

Inside a compiled loop, where updates run, that backend takes seconds for gradients of convolutions that take
milliseconds outside. Over patches they are matrix products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

# On a CPU the activations of this many rows of 512 numbers stay in a core's cache (1 MB).
BLOCK_ROWS = 512


def map_blocks(function: Callable[..., jax.Array], arguments: tuple[Any, ...], *, rows: int) -> jax.Array:
    """`function(*arguments)` for arrays with one leading batch axis, computed block after block on a CPU.

    `rows` is the number of a network's rows per element of the batch, whose elements must be independent.
    """
    batch = jax.tree.leaves(arguments)[0].shape[0]
    size = max(1, BLOCK_ROWS // rows)
    if jax.default_backend() != "cpu" or batch < 2 * size:
        return function(*arguments)
    whole = batch - batch % size
    blocks = jax.tree.map(lambda x: x[:whole].reshape(whole // size, size, *x.shape[1:]), arguments)
    out = jax.lax.map(lambda block: function(*block), blocks)
    out = out.reshape(whole, *out.shape[2:])
    if whole == batch:
        return out
    return jnp.concatenate([out, function(*jax.tree.map(lambda x: x[whole:], arguments))])


Padding = tuple[tuple[int, int], tuple[int, int]]  # zeros before and after each of the two axes


def same_padding(size: int, window: int, stride: int) -> tuple[int, int]:
    """TensorFlow's SAME: as few zeros as make ceil(size / stride) outputs, the odd one behind."""
    total = max((-(-size // stride) - 1) * stride + window - size, 0)
    return total // 2, total - total // 2


def patches(x: jax.Array, window: int, stride: int, padding: Padding) -> jax.Array:
    """The windows of x float32[B, H, W, C], zero-padded: float32[B, H', W', window * window * C]."""
    rows, columns = ((n + sum(pad) - window) // stride + 1 for n, pad in zip(x.shape[1:3], padding, strict=True))
    x = jnp.pad(x, ((0, 0), *padding, (0, 0)))
    tall, wide = (rows - 1) * stride + 1, (columns - 1) * stride + 1
    shifted = [x[:, i : i + tall : stride, j : j + wide : stride] for i in range(window) for j in range(window)]
    return jnp.concatenate(shifted, axis=-1)


def convolve(x: jax.Array, kernel: jax.Array, stride: int, padding: Padding) -> jax.Array:
    """The convolution of x float32[B, H, W, C] with kernel float32[K, K, C, F], zero-padded: float32[B, H', W', F]."""
    if jax.default_backend() == "cpu":
        return patches(x, kernel.shape[0], stride, padding) @ kernel.reshape(-1, kernel.shape[-1])
    strides = (stride, stride)
    return jax.lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))


def max_pool(x: jax.Array) -> jax.Array:
    """The maximum over 3x3 windows at stride 2, SAME: float32[B, H, W, C] to float32[B, ceil(H/2), ceil(W/2), C].

    Computed along one axis after the other as maxima of slices, because its gradient would be a scatter otherwise.
    """
    for axis in (1, 2):
        size = x.shape[axis]
        widths = [(0, 0)] * x.ndim
        widths[axis] = same_padding(size, 3, 2)
        padded, last = jnp.pad(x, widths, constant_values=-jnp.inf), -(-size // 2) * 2 - 1
        parts = [jax.lax.slice_in_dim(padded, i, i + last, 2, axis) for i in range(3)]
        x = jnp.maximum(jnp.maximum(parts[0], parts[1]), parts[2])
    return x


class Conv(nn.Module):
    """A convolution without bias of windows `size` x `size`, parameter `kernel` float32[size, size, C, features]."""

    features: int
    size: int = 3
    stride: int = 1
    padding: Padding | None = None  # none: SAME

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        shape = (self.size, self.size, x.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.kaiming_normal(), shape)
        if self.size == 1:
            return x[:, :: self.stride, :: self.stride] @ kernel[0, 0]
        rows, columns = (same_padding(n, self.size, self.stride) for n in x.shape[1:3])
        return convolve(x, kernel, self.stride, self.padding or (rows, columns))


def with_batch(x: jax.Array) -> tuple[jax.Array, tuple[int, ...]]:
    """x [..., H, W, C] as [B, H, W, C], and the axes `...` that it had."""
    return x.reshape(-1, *x.shape[-3:]), x.shape[:-3]

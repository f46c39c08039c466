"""Layer normalisation with its gradient written out.

XLA's CPU backend reduces rows in scalar loops, and differentiates the mean and the variance separately. As products
with a vector the same sums run in the matrix library, and the gradient needs two of them instead of six.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

EPSILON = 1e-6
_Saved = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def _dot(x: jax.Array, vector: jax.Array) -> jax.Array:
    """x [..., N] times `vector` [N], float32[..., 1]. Accelerators must not round what a variance is made of."""
    return jnp.matmul(x, vector[:, None], precision=jax.lax.Precision.HIGHEST)


def _row(vector: jax.Array, like: jax.Array) -> jax.Array:
    """`vector` [N] with as many axes as `like` has."""
    return vector.reshape((1,) * (like.ndim - 1) + vector.shape)


@jax.custom_vjp
def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """(x - mean) / sqrt(variance + 1e-6) * scale + bias over the last axis of x float32[..., N] (Ba et al. 2016)."""
    return _forward(x, scale, bias)[0]


def _forward(x: jax.Array, scale: jax.Array, bias: jax.Array) -> tuple[jax.Array, _Saved]:
    ones = jnp.full((x.shape[-1],), 1 / x.shape[-1], x.dtype)
    mean = _dot(x, ones)
    rate = jax.lax.rsqrt(jnp.maximum(_dot(x * x, ones) - mean * mean, 0.0) + EPSILON)
    return (x - mean) * rate * _row(scale, x) + _row(bias, x), (x, mean, rate, scale)


def _backward(saved: _Saved, grad: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    x, mean, rate, scale = saved
    normal = (x - mean) * rate
    share = scale / x.shape[-1]
    inward = grad * _row(scale, x) - _dot(grad, share) - normal * _dot(grad * normal, share)
    rows = grad.reshape(-1, x.shape[-1])
    ones = jnp.ones((1, len(rows)), x.dtype)
    high = jax.lax.Precision.HIGHEST
    to_scale = jnp.matmul(ones, (grad * normal).reshape(rows.shape), precision=high)[0]
    return inward * rate, to_scale, jnp.matmul(ones, rows, precision=high)[0]


layer_norm.defvjp(_forward, _backward)


class LayerNorm(nn.Module):
    """`layer_norm` with its parameters, named and initialised as flax's own."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        size = (x.shape[-1],)
        scale = self.param("scale", nn.initializers.ones, size)
        return layer_norm(x, scale, self.param("bias", nn.initializers.zeros, size))

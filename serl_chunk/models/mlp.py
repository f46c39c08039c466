"""Multi-layer perceptrons, their ensembles, and layer normalisation with its gradient written out.

XLA's CPU backend reduces rows in scalar loops, and differentiates mean and variance separately. As products with a
vector the sums run in the matrix library, and the gradient needs two of them instead of six.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

_EPSILON = 1e-6
_Saved = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def _dot(x: jax.Array, vector: jax.Array) -> jax.Array:
    """x [..., N] times `vector` [N], float32[..., 1], not rounded by accelerators."""
    return jnp.matmul(x, vector[:, None], precision=jax.lax.Precision.HIGHEST)


def _row(vector: jax.Array, like: jax.Array) -> jax.Array:
    return vector.reshape((1,) * (like.ndim - 1) + vector.shape)


@jax.custom_vjp
def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """(x - mean) / sqrt(variance + 1e-6) * scale + bias over the last axis of x float32[..., N] (Ba et al. 2016)."""
    return _forward(x, scale, bias)[0]


def _forward(x: jax.Array, scale: jax.Array, bias: jax.Array) -> tuple[jax.Array, _Saved]:
    ones = jnp.full((x.shape[-1],), 1 / x.shape[-1], x.dtype)
    mean = _dot(x, ones)
    rate = jax.lax.rsqrt(jnp.maximum(_dot(x * x, ones) - mean * mean, 0.0) + _EPSILON)
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


Activation = Literal["relu", "gelu", "tanh"]
KernelInit = Literal["lecun_normal", "xavier_uniform"]
Norm = Literal["none", "before", "after"]  # where LayerNorm stands, seen from the activation

# gelu: the tanh form
_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {"relu": nn.relu, "gelu": nn.gelu, "tanh": nn.tanh}
_KERNELS: dict[str, Callable[..., jax.Array]] = {
    "lecun_normal": nn.initializers.lecun_normal(),
    "xavier_uniform": nn.initializers.xavier_uniform(),
}


def _blocks(init: Callable[..., jax.Array], count: int) -> Callable[..., jax.Array]:
    """An initialiser that draws `count` equal groups of outputs as separate layers."""

    def draw(key: jax.Array, shape: Sequence[int], *dtype: Any) -> jax.Array:
        part = (*shape[:-1], shape[-1] // count)
        return jnp.concatenate([init(k, part, *dtype) for k in jax.random.split(key, count)], axis=-1)

    return draw


class SharedDense(nn.Module):
    """A Dense of `shared` and x concatenated, float32[..., width], faster where many x have the same `shared`.

    Parameters and, but for the order of a sum, results are equal.
    """

    width: int
    kernel_init: Callable[..., jax.Array]

    @nn.compact
    def __call__(self, shared: jax.Array, x: jax.Array) -> jax.Array:
        first = shared.shape[-1]
        kernel = self.param("kernel", self.kernel_init, (first + x.shape[-1], self.width))
        bias = self.param("bias", nn.initializers.zeros_init(), (self.width,))
        begun = shared @ kernel[:first]
        return begun + _row(bias, begun) + x @ kernel[first:]


class Mlp(nn.Module):
    """Dense, activation and LayerNorm for each hidden width, then a Dense of width `out`: float32[..., out].

    `shared` float32[..., S] are inputs in front of x float32[..., F], with axes of size 1 where x has many (of one
    observation). The parameters are those for both in one array.
    """

    hidden: Sequence[int]
    out: int
    norm: Norm = "none"
    out_bias: float | tuple[float, ...] = 0.0  # of the last bias, initially, one for all outputs or one each
    activation: Activation = "relu"
    kernel_init: KernelInit = "lecun_normal"
    out_blocks: int = 1  # groups of outputs that are initialised apart; matters where fan-out counts (xavier)

    @nn.compact
    def __call__(self, x: jax.Array, shared: jax.Array | None = None) -> jax.Array:
        kernel, activate = _KERNELS[self.kernel_init], _ACTIVATIONS[self.activation]
        if shared is not None and not self.hidden:
            shared = jnp.broadcast_to(shared, (*x.shape[:-1], shared.shape[-1]))
            x = jnp.concatenate([shared, x], axis=-1)
        for i, width in enumerate(self.hidden):
            if i == 0 and shared is not None:
                x = SharedDense(width, kernel, name="Dense_0")(shared, x)
            else:
                x = nn.Dense(width, kernel_init=kernel, name=f"Dense_{i}")(x)
            if self.norm == "before":
                x = LayerNorm()(x)
            x = activate(x)
            if self.norm == "after":
                x = LayerNorm()(x)
        last = kernel if self.out_blocks == 1 else _blocks(kernel, self.out_blocks)
        bias = self.out_bias if isinstance(self.out_bias, float) else jnp.asarray(self.out_bias, jnp.float32)
        name = f"Dense_{len(self.hidden)}"
        return nn.Dense(self.out, kernel_init=last, bias_init=nn.initializers.constant(bias), name=name)(x)


class StackedMlp(Mlp):
    """`count` networks of inputs float32[..., F] at once: float32[K, ...], or [K, ..., out] unless `out` is 1."""

    count: int = 2

    @nn.compact
    def __call__(self, x: jax.Array, shared: jax.Array | None = None) -> jax.Array:
        axes: Any = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "in_axes": None, "out_axes": 0}
        heads = nn.vmap(Mlp, **axes, axis_size=self.count)
        layers = (self.hidden, self.out, self.norm, self.out_bias, self.activation, self.kernel_init)
        outputs = heads(*layers)(x, shared)
        return outputs[..., 0] if self.out == 1 else outputs

    @staticmethod
    def heads(params: Any) -> Any:
        (stacked,) = params.values()
        return stacked

"""An ensemble of equal networks, computed one network after the other where that is faster.

On a CPU the activations of one network stay in a core's cache (benchmarks/updates.py measures the gain); accelerators
are faster with all networks at once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from serl_chunk.models.mlp import Mlp, StackedMlp
from serl_chunk.models.sums import Sum

_AT_ONCE = 2  # heads in one turn of a loop, which may run on two cores
_MANY_ROWS = 128  # with fewer the parameters are most of the work, and slicing them would add to it

Tree = Any
HeadLoss = Callable[[jax.Array, Any, Any], Sum]


class Ensemble:
    """K heads, each an `Mlp`: outputs float32[K, ...], or [K, ..., out] unless `out` is 1.

    Parameters have a leading axis K. `layers` are those of `Mlp`.
    """

    def __init__(self, count: int, **layers: Any) -> None:
        self.count = count
        self._head: Any = Mlp(**layers)
        self._stacked: Any = StackedMlp(**layers, count=count)

    def init(self, key: jax.Array, x: jax.Array) -> Tree:
        return self._stacked.init(key, x)["params"]

    def of_head(self, head: Tree, x: jax.Array, shared: jax.Array | None = None) -> jax.Array:
        """The output of one head's parameters: float32[...], or [..., out]."""
        last = self._head.apply({"params": head}, x, shared)
        return last[..., 0] if self._head.out == 1 else last

    def outputs(self, params: Tree, x: jax.Array, shared: jax.Array | None = None) -> jax.Array:
        """Those of all heads in `params`, which may be fewer than K; `shared`: see `Mlp`."""
        heads = StackedMlp.heads(params)
        count = len(jax.tree.leaves(heads)[0])
        if one_by_one(count) and math.prod(x.shape[:-1]) >= _MANY_ROWS:
            return _each(lambda head: self.of_head(head, x, shared), heads)
        return self._stacked.clone(count=count).apply({"params": params}, x, shared)

    def mean_loss(
        self, params: Tree, x: jax.Array, loss: HeadLoss, own: Tree = (), constants: Tree = ()
    ) -> tuple[Sum, jax.Array]:
        """mean over k of `loss(outputs_k, own_k, constants)`, as a sum, and the outputs as constants.

        `own` has a leading axis K on every leaf. Gradients are with respect to `params` and x.
        """
        if not one_by_one(self.count):
            outputs = self.outputs(params, x)
            sums = jax.vmap(lambda output, own: loss(output, own, constants))(outputs, own)
            return Sum(jnp.sum(sums.total), jnp.sum(sums.weight)), jax.lax.stop_gradient(outputs)

        def of_one(head: Tree, x: jax.Array, constants: Tree) -> tuple[jax.Array, Any]:
            output = self.of_head(head["net"], x)
            total, weight = loss(output, head["own"], constants)
            return total, (weight, output)

        heads = {"net": StackedMlp.heads(params), "own": jax.lax.stop_gradient(own)}
        total, (weights, outputs) = _summed_loss(of_one, heads, x, constants)
        return Sum(total, jnp.sum(weights)), outputs

    def mean(self, params: Tree, x: jax.Array, value: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """mean over k of `value(outputs_k)`, float32[B] of inputs float32[B, F], with a gradient to x alone.

        A row's value must depend on its own inputs alone.
        """
        if not one_by_one(self.count):
            return jnp.mean(value(self.outputs(jax.lax.stop_gradient(params), x)), axis=0)
        return _mean_values(lambda head, x: value(self.of_head(head, x)), StackedMlp.heads(params), x)


def one_by_one(heads: int) -> bool:
    """Whether `heads` networks are computed one after the other."""
    return heads > 1 and jax.default_backend() == "cpu"


def _each(of: Callable[[Tree], Any], heads: Tree) -> Any:
    """`of` every head of a tree with a leading axis K on every leaf, stacked."""
    return jax.lax.scan(lambda _, head: (None, of(head)), None, heads, unroll=_AT_ONCE)[1]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _summed_loss(
    loss: Callable[[Tree, Tree, Tree], tuple[jax.Array, Tree]], heads: Tree, inputs: Tree, constants: Tree
) -> tuple[jax.Array, Tree]:
    """sum over k of `loss(heads[k], inputs, constants)[0]` float32[], and the second results stacked, [K, ...].

    The sum has gradients with respect to `heads` and `inputs`; `constants` and the second results carry none.
    """
    losses, others = _each(lambda head: loss(head, inputs, constants), heads)
    return jnp.sum(losses), others


def _summed_forward(loss: Callable[..., Any], heads: Tree, inputs: Tree, constants: Tree) -> tuple[Any, Any]:
    # Forward and backward of one head before the next one's, while its activations are in the cache.
    with_gradient = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)

    def step(total: Tree, head: Tree) -> tuple[Tree, Any]:
        (value, other), (to_head, to_inputs) = with_gradient(head, inputs, constants)
        return jax.tree.map(jnp.add, total, to_inputs), (value, other, to_head)

    zeros = jax.tree.map(jnp.zeros_like, inputs)
    to_inputs, (losses, others, to_heads) = jax.lax.scan(step, zeros, heads, unroll=_AT_ONCE)
    return (jnp.sum(losses), others), (to_heads, to_inputs, constants)


def _summed_backward(_: Callable[..., Any], saved: Any, cotangents: Any) -> tuple[Tree, Tree, Tree]:
    to_heads, to_inputs, constants = saved
    scale = cotangents[0]
    scaled = jax.tree.map(lambda g: scale * g, (to_heads, to_inputs))
    return *scaled, jax.tree.map(jnp.zeros_like, constants)


_summed_loss.defvjp(_summed_forward, _summed_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mean_values(values: Callable[[Tree, jax.Array], jax.Array], heads: Tree, inputs: jax.Array) -> jax.Array:
    """The mean over k of `values(heads[k], inputs)` float32[B], with a gradient to the inputs float32[B, F] alone."""
    return jnp.mean(_each(lambda head: values(head, inputs), heads), axis=0)


def _mean_forward(
    values: Callable[[Tree, jax.Array], jax.Array], heads: Tree, inputs: jax.Array
) -> tuple[jax.Array, Any]:
    def total(inputs: jax.Array, head: Tree) -> tuple[jax.Array, jax.Array]:
        out = values(head, inputs)
        return jnp.sum(out), out

    def step(sums: tuple[jax.Array, jax.Array], head: Tree) -> tuple[tuple[jax.Array, jax.Array], None]:
        (_, out), to_inputs = jax.value_and_grad(total, has_aux=True)(inputs, head)
        return (sums[0] + out, sums[1] + to_inputs), None

    count = len(jax.tree.leaves(heads)[0])
    zeros = jnp.zeros(inputs.shape[:-1]), jnp.zeros_like(inputs)
    (out, to_inputs), _ = jax.lax.scan(step, zeros, heads, unroll=_AT_ONCE)
    return out / count, (to_inputs / count, heads)


def _mean_backward(_: Callable[..., Any], saved: Any, cotangent: jax.Array) -> tuple[Tree, jax.Array]:
    to_inputs, heads = saved
    return jax.tree.map(jnp.zeros_like, heads), cotangent[..., None] * to_inputs


_mean_values.defvjp(_mean_forward, _mean_backward)

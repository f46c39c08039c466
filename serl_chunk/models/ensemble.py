"""Ensembles of equal networks, computed one network after the other where that is faster.

On a CPU the activations of one network stay in a core's cache (benchmarks/updates.py measures the gain); accelerators
are faster with all networks at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

_AT_ONCE = 2  # heads in one turn of a loop, which may run on two cores

Tree = Any
LossOfHead = Callable[[Tree, Tree, Tree], tuple[jax.Array, Tree]]
ValuesOfHead = Callable[[Tree, jax.Array], jax.Array]


def one_by_one(heads: int) -> bool:
    """Whether `heads` networks are computed one after the other."""
    return heads > 1 and jax.default_backend() == "cpu"


def each(of: Callable[[Tree], Any], heads: Tree) -> Any:
    """`of` every head of a tree with a leading axis K on every leaf, stacked."""
    return jax.lax.scan(lambda _, head: (None, of(head)), None, heads, unroll=_AT_ONCE)[1]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def summed_loss(loss: LossOfHead, heads: Tree, inputs: Tree, constants: Tree) -> tuple[jax.Array, Tree]:
    """sum over k of `loss(heads[k], inputs, constants)[0]` float32[], and the second results stacked, [K, ...].

    `heads` has a leading axis K on every leaf. The sum has gradients with respect to `heads` and `inputs`; `constants`
    and the second results carry none.
    """
    losses, others = each(lambda head: loss(head, inputs, constants), heads)
    return jnp.sum(losses), others


def _summed_forward(loss: LossOfHead, heads: Tree, inputs: Tree, constants: Tree) -> tuple[Any, Any]:
    # Forward and backward of one head before the next one's, while its activations are in the cache.
    with_gradient = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)

    def step(total: Tree, head: Tree) -> tuple[Tree, Any]:
        (value, other), (to_head, to_inputs) = with_gradient(head, inputs, constants)
        return jax.tree.map(jnp.add, total, to_inputs), (value, other, to_head)

    zeros = jax.tree.map(jnp.zeros_like, inputs)
    to_inputs, (losses, others, to_heads) = jax.lax.scan(step, zeros, heads, unroll=_AT_ONCE)
    return (jnp.sum(losses), others), (to_heads, to_inputs, constants)


def _summed_backward(_: LossOfHead, saved: Any, cotangents: Any) -> tuple[Tree, Tree, Tree]:
    to_heads, to_inputs, constants = saved
    scale = cotangents[0]
    scaled = jax.tree.map(lambda g: scale * g, (to_heads, to_inputs))
    return *scaled, jax.tree.map(jnp.zeros_like, constants)


summed_loss.defvjp(_summed_forward, _summed_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def mean_values(values: ValuesOfHead, heads: Tree, inputs: jax.Array) -> jax.Array:
    """The mean over k of `values(heads[k], inputs)` float32[B], with a gradient to the inputs float32[B, F] alone.

    Each row's value must depend on its own inputs alone.
    """
    return jnp.mean(each(lambda head: values(head, inputs), heads), axis=0)


def _mean_forward(values: ValuesOfHead, heads: Tree, inputs: jax.Array) -> tuple[jax.Array, Any]:
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


def _mean_backward(_: ValuesOfHead, saved: Any, cotangent: jax.Array) -> tuple[Tree, jax.Array]:
    to_inputs, heads = saved
    return jax.tree.map(jnp.zeros_like, heads), cotangent[..., None] * to_inputs


mean_values.defvjp(_mean_forward, _mean_backward)

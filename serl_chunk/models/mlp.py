"""Multi-layer perceptrons and their ensembles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from serl_chunk.models.layer_norm import LayerNorm

Activation = Literal["relu", "gelu"]
KernelInit = Literal["lecun_normal", "xavier_uniform"]
Norm = Literal["none", "before", "after"]  # where LayerNorm stands, seen from the activation

_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {"relu": nn.relu, "gelu": nn.gelu}  # gelu: the tanh form
_KERNELS: dict[str, Callable[..., jax.Array]] = {
    "lecun_normal": nn.initializers.lecun_normal(),
    "xavier_uniform": nn.initializers.xavier_uniform(),
}


def _blocks(init: Callable[..., jax.Array], count: int) -> Callable[..., jax.Array]:
    """An initialiser that draws `count` equal groups of outputs as if each were a layer of its own."""

    def draw(key: jax.Array, shape: Sequence[int], *dtype: Any) -> jax.Array:
        part = (*shape[:-1], shape[-1] // count)
        return jnp.concatenate([init(k, part, *dtype) for k in jax.random.split(key, count)], axis=-1)

    return draw


class Mlp(nn.Module):
    """Dense, activation and LayerNorm for each hidden width, then a Dense of width `out`: float32[..., out]."""

    hidden: Sequence[int]
    out: int
    norm: Norm = "none"
    out_bias: float | tuple[float, ...] = 0.0  # initial value of the last bias, one for all outputs or one each
    activation: Activation = "relu"
    kernel_init: KernelInit = "lecun_normal"
    out_blocks: int = 1  # groups of outputs that are initialised apart; matters where fan-out counts (xavier)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel, activate = _KERNELS[self.kernel_init], _ACTIVATIONS[self.activation]
        for width in self.hidden:
            x = nn.Dense(width, kernel_init=kernel)(x)
            if self.norm == "before":
                x = LayerNorm()(x)
            x = activate(x)
            if self.norm == "after":
                x = LayerNorm()(x)
        last = kernel if self.out_blocks == 1 else _blocks(kernel, self.out_blocks)
        bias = self.out_bias if isinstance(self.out_bias, float) else jnp.asarray(self.out_bias, jnp.float32)
        return nn.Dense(self.out, kernel_init=last, bias_init=nn.initializers.constant(bias))(x)


class CriticEnsemble(nn.Module):
    """K critics of inputs float32[..., F], the observation's features and a flat chunk: float32[K, ...].

    With `out` other than 1 each has so many outputs: float32[K, ..., out].
    """

    hidden: Sequence[int]
    ensemble: int
    out_bias: float | tuple[float, ...] = 0.0
    norm: Norm = "before"
    activation: Activation = "relu"
    kernel_init: KernelInit = "lecun_normal"
    out: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        heads = nn.vmap(
            Mlp,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=None,
            out_axes=0,
            axis_size=self.ensemble,
        )(self.hidden, self.out, self.norm, self.out_bias, self.activation, self.kernel_init)
        outputs = heads(x)
        return outputs[..., 0] if self.out == 1 else outputs

    @staticmethod
    def heads(params: Any) -> Any:
        """The parameters of the K Mlps, with a leading axis K: each one's are what an Mlp of its own has."""
        (stacked,) = params.values()
        return stacked

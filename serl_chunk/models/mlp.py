"""Multi-layer perceptrons and their ensembles."""

from __future__ import annotations

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp


class Mlp(nn.Module):
    """Dense -> (LayerNorm) -> relu for each hidden width, then a Dense of width `out`: float32[..., out]."""

    hidden: Sequence[int]
    out: int
    layer_norm: bool = False
    out_bias: float = 0.0  # initial value of the last bias

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in self.hidden:
            x = nn.Dense(width)(x)
            if self.layer_norm:
                x = nn.LayerNorm()(x)
            x = nn.relu(x)
        return nn.Dense(self.out, bias_init=nn.initializers.constant(self.out_bias))(x)


class CriticEnsemble(nn.Module):
    """K chunk critics on (observation features float32[..., F], flat chunk float32[..., D]): float32[K, ...]."""

    hidden: Sequence[int]
    ensemble: int
    out_bias: float = 0.0

    @nn.compact
    def __call__(self, features: jax.Array, chunk: jax.Array) -> jax.Array:
        heads = nn.vmap(
            Mlp,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=None,
            out_axes=0,
            axis_size=self.ensemble,
        )(self.hidden, 1, layer_norm=True, out_bias=self.out_bias)
        return heads(jnp.concatenate([features, chunk], axis=-1))[..., 0]

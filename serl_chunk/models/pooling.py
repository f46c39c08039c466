"""From a feature map to a vector."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from serl_chunk.config.encoders import Pooling

SPATIAL_FEATURES = 8  # of each channel, HIL-SERL's number


class SpatialEmbeddings(nn.Module):
    """Learned weightings of a feature map's places: float32[..., H, W, C] -> float32[..., 8C].

    out[c, k] = sum over places of x[i, j, c] w[i, j, c, k] (SERL, Luo et al. 2024, spatial learned embeddings).
    Parameter `kernel` float32[H, W, C, 8].
    """

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        shape = (*x.shape[-3:], SPATIAL_FEATURES)
        kernel = self.param("kernel", nn.initializers.lecun_normal(), shape)
        places = x.reshape(*x.shape[:-3], -1, x.shape[-1])
        out = jnp.einsum("...pc,pck->...ck", places, kernel.reshape(-1, *shape[-2:]))
        return out.reshape(*out.shape[:-2], -1)


def pooled(x: jax.Array, pooling: Pooling) -> jax.Array:
    """A feature map float32[..., H, W, C] as a vector: of H*W*C numbers, C (`mean`) or 8C (`spatial`).

    To be called in a compact module, which then has the weights of `spatial`.
    """
    if pooling == "mean":
        return jnp.mean(x, axis=(-3, -2))
    if pooling == "spatial":
        return SpatialEmbeddings()(x)
    return x.reshape(*x.shape[:-3], -1)

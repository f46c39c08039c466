"""The residual network of IMPALA (Espeholt et al. 2018, figure 3, right), without its recurrent part."""

from __future__ import annotations

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from serl_chunk.models.convolutions import Conv, max_pool, with_batch


class _Convolution(nn.Module):
    """A 3x3 convolution with a bias."""

    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        return Conv(self.features, name="conv")(x) + bias.reshape(1, 1, 1, -1)


class Impala(nn.Module):
    """uint8[..., H, W, 3] -> float32[..., H', W', features[-1]]; each section halves H and W, rounding up.

    A section is a 3x3 convolution, a 3x3 max pool of stride 2 and two residual blocks of two convolutions.
    """

    features: Sequence[int]

    @nn.compact
    def __call__(self, image: jax.Array) -> jax.Array:
        image, lead = with_batch(image)
        x = image.astype(jnp.float32) / 127.5 - 1.0
        for width in self.features:
            x = max_pool(_Convolution(width)(x))
            for _ in range(2):
                x = x + _Convolution(width)(nn.relu(_Convolution(width)(nn.relu(x))))
        x = nn.relu(x)
        return x.reshape(*lead, *x.shape[1:])

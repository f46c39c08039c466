"""ResNet-10 with group normalisation (He 2016; Wu and He 2018), laid out as HIL-SERL's, whose weights fit it."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from serl_chunk.models.convolutions import Conv, max_pool, with_batch

WIDTHS = (64, 128, 256, 512)  # of the four stages, one block each
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, of RGB in [0, 1]
_GROUPS, _EPSILON = 4, 1e-5


class GroupNorm(nn.Module):
    """Normalises x float32[B, H, W, C] over the pixels and channels of each of 4 groups (Wu and He 2018)."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        batch, height, width, channels = x.shape
        scale = self.param("scale", nn.initializers.ones, (channels,))
        bias = self.param("bias", nn.initializers.zeros, (channels,))
        groups = x.reshape(batch, height * width, _GROUPS, channels // _GROUPS)
        mean = jnp.mean(groups, axis=(1, 3), keepdims=True)
        rate = jax.lax.rsqrt(jnp.mean(jnp.square(groups - mean), axis=(1, 3), keepdims=True) + _EPSILON)
        wide = (1, 1, 1, channels)
        return ((groups - mean) * rate).reshape(x.shape) * scale.reshape(wide) + bias.reshape(wide)


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut, which is a 1x1 convolution where the shape changes."""

    features: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.relu(GroupNorm(name="norm_0")(Conv(self.features, stride=self.stride, name="conv_0")(x)))
        y = GroupNorm(name="norm_1")(Conv(self.features, name="conv_1")(y))
        if x.shape != y.shape:
            x = GroupNorm(name="norm_proj")(Conv(self.features, 1, self.stride, name="conv_proj")(x))
        return nn.relu(x + y)


class ResNet10(nn.Module):
    """uint8[..., H, W, 3] -> float32[..., ceil(H/32), ceil(W/32), 512]: what stands before the pooling.

    4.906 million parameters; `config.encoders.resnet10_leaves` lists them. Images keep their size, where HIL-SERL
    scales them to 128 x 128.
    """

    @nn.compact
    def __call__(self, image: jax.Array) -> jax.Array:
        image, lead = with_batch(image)
        mean, std = (jnp.array(v).reshape(1, 1, 1, 3) for v in (_MEAN, _STD))
        x = (image.astype(jnp.float32) / 255.0 - mean) / std
        x = Conv(WIDTHS[0], 7, 2, ((3, 3), (3, 3)), name="conv_init")(x)
        x = max_pool(nn.relu(GroupNorm(name="norm_init")(x)))
        for i, width in enumerate(WIDTHS):
            x = Block(width, 1 if i == 0 else 2, name=f"block_{i}")(x)
        return x.reshape(*lead, *x.shape[1:])

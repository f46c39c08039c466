"""From an observation to a feature vector: the state, and one small convolutional encoder for all cameras."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from serl_chunk.types import IMAGE_PREFIX, STATE


def _patches(x: jax.Array) -> jax.Array:
    """3x3 patches at stride 2 of float32[..., H, W, C], zero-padded: float32[..., ceil(H/2), ceil(W/2), 9C]."""
    height, width = x.shape[-3], x.shape[-2]
    rows, columns = -(-height // 2), -(-width // 2)
    lead = [(0, 0)] * (x.ndim - 3)
    padded = jnp.pad(x, [*lead, (1, 2 * rows - height + 1), (1, 2 * columns - width + 1), (0, 0)])
    shifted = [padded[..., i : i + 2 * rows : 2, j : j + 2 * columns : 2, :] for i in range(3) for j in range(3)]
    return jnp.concatenate(shifted, axis=-1)


class ConvEncoder(nn.Module):
    """uint8[..., H, W, 3] -> float32[..., latent]: stride-2 3x3 convolutions, then Dense, LayerNorm and tanh.

    Each convolution is a matrix product over patches: XLA's CPU backend runs the gradient of a strided
    convolution in scalar loops, hundreds of times slower.
    """

    features: Sequence[int]
    latent: int

    @nn.compact
    def __call__(self, image: jax.Array) -> jax.Array:
        x = image.astype(jnp.float32) / 127.5 - 1.0
        for width in self.features:
            x = nn.relu(nn.Dense(width)(_patches(x)))
        x = x.reshape(*x.shape[:-3], -1)
        return jnp.tanh(nn.LayerNorm()(nn.Dense(self.latent)(x)))


class ObservationEncoder(nn.Module):
    """Concatenates the normalised state (where used) and every camera's embedding: float32[..., F]."""

    image_keys: Sequence[str]
    use_state: bool
    features: Sequence[int]
    latent: int

    @nn.compact
    def __call__(self, observation: Mapping[str, jax.Array]) -> jax.Array:
        parts = [observation[STATE]] if self.use_state else []
        if self.image_keys:
            encoder = ConvEncoder(self.features, self.latent)  # one set of weights for all cameras
            parts += [encoder(observation[IMAGE_PREFIX + key]) for key in self.image_keys]
        return jnp.concatenate(parts, axis=-1)


def random_shift(key: jax.Array, observation: Mapping[str, jax.Array], pixels: int) -> dict[str, jax.Array]:
    """Shift every image of a batch uint8[B, H, W, 3] by up to `pixels`, edges repeated (DrQ, Kostrikov 2021).

    One offset per sample, the same for all of its cameras.
    """
    if pixels == 0:
        return dict(observation)
    batch = observation[STATE].shape[0]
    offsets = jax.random.randint(key, (batch, 2), 0, 2 * pixels + 1)

    def shift(image: jax.Array, offset: jax.Array) -> jax.Array:
        padded = jnp.pad(image, ((pixels, pixels), (pixels, pixels), (0, 0)), mode="edge")
        return jax.lax.dynamic_slice(padded, (offset[0], offset[1], 0), image.shape)

    return {k: jax.vmap(shift)(v, offsets) if k.startswith(IMAGE_PREFIX) else v for k, v in observation.items()}

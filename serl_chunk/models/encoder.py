"""Encoders from an observation to a feature vector: the state, the task's text, and images of all cameras or each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from serl_chunk.config.agents.encoder import EncoderConfig, Kind, Pooling
from serl_chunk.config.agents.language import LanguageConfig
from serl_chunk.models.convolutions import Conv, map_blocks, max_pool, patches, with_batch
from serl_chunk.models.resnet import ResNet10
from serl_chunk.types import FEATURE_PREFIX, IMAGE_PREFIX, PROMPT, PROMPT_MASK, STATE

SPATIAL_FEATURES = 8  # of each channel, HIL-SERL's number
LANGUAGE_FEATURES = 64  # of a text


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
    """A feature map float32[..., H, W, C] as H*W*C numbers, C (`mean`) or 8C (`spatial`: weights of the caller)."""
    if pooling == "mean":
        return jnp.mean(x, axis=(-3, -2))
    if pooling == "spatial":
        return SpatialEmbeddings()(x)
    return x.reshape(*x.shape[:-3], -1)


class _Convolution(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        return Conv(self.features, name="conv")(x) + bias.reshape(1, 1, 1, -1)


class Impala(nn.Module):
    """uint8[..., H, W, 3] -> float32[..., H', W', features[-1]]; each section halves H and W, rounding up."""

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


def _patches(x: jax.Array) -> jax.Array:
    """3x3 patches at stride 2 of float32[B, H, W, C], zero-padded: float32[B, ceil(H/2), ceil(W/2), 9C]."""
    rows, columns = ((1, 1 + size % 2) for size in x.shape[1:3])
    return patches(x, 3, 2, (rows, columns))


class _Weights(nn.Module):
    """Kernel float32[C, F] and bias float32[F] of an nn.Dense, for use where no module can be called."""

    inputs: int
    features: int

    @nn.compact
    def __call__(self) -> tuple[jax.Array, jax.Array]:
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (self.inputs, self.features))
        return kernel, self.param("bias", nn.initializers.zeros_init(), (self.features,))


class ConvEncoder(nn.Module):
    """uint8[..., H, W, 3] -> float32[..., latent]: stride-2 3x3 convolutions, pooling, then Dense, LayerNorm and tanh.

    Each convolution is a matrix product over patches, because XLA's CPU backend runs the gradient of a strided
    convolution in scalar loops, hundreds of times slower.
    """

    features: Sequence[int]
    latent: int
    pooling: Pooling = "flatten"

    @nn.compact
    def __call__(self, image: jax.Array) -> jax.Array:
        widths = (image.shape[-1], *self.features)
        layers = [
            _Weights(9 * before, width, name=f"Dense_{i}")()
            for i, (before, width) in enumerate(zip(widths, self.features, strict=False))
        ]

        # The activations of a few images stay in a core's cache, and are recomputed there for the gradient.
        @partial(jax.checkpoint, prevent_cse=False)
        def convolved(images: jax.Array) -> jax.Array:
            x = images.astype(jnp.float32) / 127.5 - 1.0
            for kernel, bias in layers:
                x = nn.relu(_patches(x) @ kernel + bias[None, None, None])
            return x

        images, lead = with_batch(image)
        height, width = images.shape[1:3]
        rows = max(1, 2 * 9 * widths[0] * (height // 2) * (width // 2) // 512)  # the first layer's patches, twice
        x = map_blocks(convolved, (images,), rows=rows)
        x = pooled(x.reshape(*lead, *x.shape[1:]), self.pooling)
        return jnp.tanh(nn.LayerNorm()(nn.Dense(self.latent, name=f"Dense_{len(layers)}")(x)))


class BackboneEncoder(nn.Module):
    """A backbone, pooling, Dense, LayerNorm and tanh: float32[..., latent].

    The input is uint8[..., H, W, 3]; without a backbone (where it is frozen) its feature map float16[..., h, w, C].
    Parameters: {"backbone"} where there is one, and those of the head.
    """

    backbone: nn.Module | None
    latent: int
    pooling: Pooling

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.astype(jnp.float32) if self.backbone is None else self.backbone(x)
        return jnp.tanh(nn.LayerNorm()(nn.Dense(self.latent)(pooled(x, self.pooling))))


class LanguageEncoder(nn.Module):
    """Tokens int32[..., L] and which are given, bool[..., L] -> float32[..., 64].

    Each token's learned embedding and its place's pass a layer, so that their order counts; then the mean over the
    given tokens, Dense, LayerNorm and tanh.
    """

    vocabulary: int

    @nn.compact
    def __call__(self, tokens: jax.Array, given: jax.Array) -> jax.Array:
        width = LANGUAGE_FEATURES
        embedding = nn.initializers.normal(width**-0.5)
        table = self.param("tokens", embedding, (self.vocabulary, width))
        places = self.param("places", embedding, (tokens.shape[-1], width))
        x = table[tokens]
        x = nn.relu(nn.Dense(width)(x + jnp.broadcast_to(places, x.shape)))
        weight = given[..., None].astype(jnp.float32)
        mean = jnp.sum(x * weight, axis=-2) / jnp.maximum(jnp.sum(weight, axis=-2), 1.0)
        return jnp.tanh(nn.LayerNorm()(nn.Dense(width)(mean)))


class SegmentEncoder(nn.Module):
    """Segments float16[..., n, W], each by a Dense, LayerNorm and tanh of its own: float32[..., n * latent]."""

    latent: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        axes: Any = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "in_axes": -2, "out_axes": -2}
        dense, norm = nn.vmap(nn.Dense, **axes), nn.vmap(nn.LayerNorm, **axes)
        x = jnp.tanh(norm(name="norm")(dense(self.latent, name="dense")(x.astype(jnp.float32))))
        return x.reshape(*x.shape[:-2], -1)


class ObservationEncoder(nn.Module):
    """Concatenates the state (where used), the text's embedding (where read) and every camera's: float32[..., F].

    The normalised state float32[..., S] enters as it is, or through Dense, LayerNorm and tanh of width `state_latent`.
    A camera's input is its frame `images/<camera>`, or a frozen backbone's `features/<camera>`. With `segments` a
    policy's `features/policy` float16[..., n, W] enter too, each of them with this many numbers.
    """

    image_keys: Sequence[str]
    use_state: bool
    config: EncoderConfig
    language: LanguageConfig = LanguageConfig()
    segments: int = 0

    @nn.compact
    def __call__(self, observation: Mapping[str, jax.Array]) -> jax.Array:
        parts = [self._embedded_state(observation[STATE])] if self.use_state else []
        if self.segments:
            parts.append(SegmentEncoder(self.segments, name="segments")(observation[FEATURE_PREFIX + "policy"]))
        if self.language.reads:
            of_text = LanguageEncoder(self.language.vocabulary, name="language")
            parts.append(of_text(observation[PROMPT], observation[PROMPT_MASK]))
        prefix = FEATURE_PREFIX if self.config.frozen_backbone else IMAGE_PREFIX
        shared = self._camera_encoder("cameras") if self.image_keys and self.config.share_cameras else None
        for key in self.image_keys:
            encoder = shared or self._camera_encoder(f"camera_{key}")
            parts.append(encoder(observation[prefix + key]))
        return jnp.concatenate(parts, axis=-1)

    def _embedded_state(self, state: jax.Array) -> jax.Array:
        width = self.config.state_latent
        if width == 0:
            return state
        dense = nn.Dense(width, kernel_init=nn.initializers.xavier_uniform(), name="state_dense")
        return jnp.tanh(nn.LayerNorm(name="state_norm")(dense(state)))

    def _camera_encoder(self, name: str) -> nn.Module:
        c = self.config
        if c.kind == "conv":
            name = "ConvEncoder_0" if c.share_cameras else name  # the name in checkpoints
            return ConvEncoder(c.features, c.latent, c.pooling, name=name)
        backbone = None if c.frozen_backbone else make_backbone(c.kind, c.features)
        return BackboneEncoder(backbone, c.latent, c.pooling, name=name)


def make_backbone(kind: Kind, features: Sequence[int]) -> nn.Module:
    """The convolutional part of an `impala` or `resnet10` encoder, uint8[..., H, W, 3] -> float32[..., h, w, C]."""
    orphan: Any = {"parent": None}  # adopted by the module that gets it
    return ResNet10(**orphan) if kind == "resnet10" else Impala(features, **orphan)


def random_shift(key: jax.Array, observation: Mapping[str, jax.Array], pixels: int) -> dict[str, jax.Array]:
    """Shift a sample's images uint8[B, H, W, 3] alike by up to `pixels`, edges repeated (DrQ, Kostrikov 2021)."""
    batch = observation[STATE].shape[0]
    offsets = jax.random.randint(key, (batch, 2), 0, 2 * pixels + 1)

    def shift(image: jax.Array, offset: jax.Array) -> jax.Array:
        padded = jnp.pad(image, ((pixels, pixels), (pixels, pixels), (0, 0)), mode="edge")
        return jax.lax.dynamic_slice(padded, (offset[0], offset[1], 0), image.shape)

    return {k: jax.vmap(shift)(v, offsets) if k.startswith(IMAGE_PREFIX) else v for k, v in observation.items()}

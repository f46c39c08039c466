"""ResNet-10 with group normalisation (He 2016; Wu and He 2018), laid out as HIL-SERL's, and its weight files."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from serl_chunk.io import os_reason
from serl_chunk.models.convolutions import Conv, max_pool, with_batch
from serl_chunk.types import ConfigError

WIDTHS = (64, 128, 256, 512)  # of the four stages, one block each
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, of RGB in [0, 1]
_GROUPS, _EPSILON = 4, 1e-5
Shape = tuple[int, ...]


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
    """Two 3x3 convolutions parallel to a shortcut, which is a 1x1 convolution where the shape changes."""

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
    """uint8[..., H, W, 3] -> float32[..., ceil(H/32), ceil(W/32), 512]; HIL-SERL first scales images to 128 x 128."""

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


def read_weights(path: str, leaves: Mapping[str, Shape]) -> dict[str, np.ndarray]:
    """The float32 arrays named by `leaves`, in their shapes, from the file at `path`; no pickle in it is read.

    Raises ConfigError for a file that cannot be read, and for the first name that is missing, unknown, of another
    shape, not of floats or not finite.
    """
    where = f"agent.encoder.weights={path}"
    try:
        file = np.load(Path(path).expanduser(), allow_pickle=False)
        if not isinstance(file, np.lib.npyio.NpzFile):
            raise ValueError("it is a single array")
        with file:
            found = {name: file[name] for name in file.files}
    except FileNotFoundError:
        raise ConfigError(
            f"{where}: no such file. The learner reads it, and each actor where agent.encoder.frozen_backbone is True: "
            "give its path on this machine, or make one with `serl-chunk data encoder resnet10_params.pkl FILE.npz`"
        ) from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigError(
            f"{where}: not a .npz of plain arrays ({os_reason(error)}). Convert HIL-SERL's weights, a pickle, with "
            "`serl-chunk data encoder resnet10_params.pkl FILE.npz`"
        ) from error
    return checked(found, leaves, where)


def checked(found: Mapping[str, np.ndarray], leaves: Mapping[str, Shape], where: str) -> dict[str, np.ndarray]:
    """`found` as float32 in the order of `leaves`; raises ConfigError, which begins with `where`."""
    for name, shape in leaves.items():
        if name not in found:
            raise ConfigError(f"{where}: {name!r} of shape {shape} is missing. Use the weights of this network")
        array = found[name]
        if array.shape != shape or array.dtype.kind != "f":
            found_is = f"{array.dtype}{array.shape}, expected floats of shape {shape}"
            raise ConfigError(f"{where}: {name!r} is {found_is}. Use the weights of this network")
        if not np.isfinite(array).all():
            raise ConfigError(f"{where}: {name!r} has values that are not finite. Make or copy the file again")
    unknown = sorted(set(found) - set(leaves))
    if unknown:
        raise ConfigError(f"{where}: this network has no {unknown[0]!r}. Use the weights of this network")
    return {name: np.asarray(found[name], np.float32) for name in leaves}

"""A frozen backbone's features of frames that lie in memory, outside of an update."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from serl_chunk.agents.vision import Params, Vision
from serl_chunk.types import CameraSpec

# Frames in one call: as many large ones as there are, then small ones, the last filled up. Two sizes, so that a few new
# frames cost no large batch, and yet nothing is compiled again whatever their number.
SIZES = (64, 8)


class FrameEmbedder:
    """uint8[N, H, W, 3] -> float16[N, h, w, C] on the host, for any N: the features that an update would compute.

    Two compilations per size of image. Keeps a copy of the weights, because updates donate theirs; they never change.
    May be called from any thread.
    """

    def __init__(self, vision: Vision, frozen: Params) -> None:
        self._frozen = jax.tree.map(jnp.copy, frozen)
        self._embed = jax.jit(vision.embed)

    def shape(self, camera: CameraSpec) -> tuple[int, int, int]:
        """(h, w, C) of one frame's features."""
        frame = jax.ShapeDtypeStruct((1, camera.height, camera.width, 3), jnp.uint8)
        height, width, channels = jax.eval_shape(self._embed, self._frozen, frame).shape[1:]
        return height, width, channels

    def __call__(self, images: np.ndarray) -> np.ndarray:
        """Features of `images`, one or more; an array of its own."""
        large, small = SIZES
        whole = len(images) - len(images) % large
        parts = [self._embed(self._frozen, images[at : at + large]) for at in range(0, whole, large)]
        for at in range(whole, len(images), small):
            few = images[at : at + small]
            filled = np.concatenate([few, np.zeros((small - len(few), *few.shape[1:]), np.uint8)])
            parts.append(self._embed(self._frozen, filled))
        # What was filled up is cut on the host: a slice on the device is compiled for every length.
        return np.concatenate([np.asarray(part) for part in parts])[: len(images)]

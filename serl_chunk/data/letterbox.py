"""Frames scaled to another size without being distorted, with black bars: once, or on each access of lazy ones."""

from __future__ import annotations

from typing import Any

import numpy as np

from serl_chunk.data.frames import Frames


def letterbox(images: np.ndarray, height: int, width: int) -> np.ndarray:
    """Scale images uint8[..., H, W, 3] into the middle of black ones, uint8[..., height, width, 3].

    The pixels are those of openpi's data transform. Images that have the size are returned as they are.
    """
    h, w = images.shape[-3:-1]
    if (h, w) == (height, width):
        return images
    from PIL import Image  # slow to import, and few agents need it

    ratio = max(w / width, h / height)
    inner_height, inner_width = max(1, int(h / ratio)), max(1, int(w / ratio))
    top, left = (height - inner_height) // 2, (width - inner_width) // 2
    out = np.zeros((*images.shape[:-3], height, width, 3), np.uint8)
    inner = out[..., top : top + inner_height, left : left + inner_width, :]
    for place in np.ndindex(images.shape[:-3]):
        scaled = Image.fromarray(images[place]).resize((inner_width, inner_height), Image.Resampling.BILINEAR)
        inner[place] = np.asarray(scaled)
    return out


class LetterboxedImages:
    """Images uint8[N, height, width, 3], letterboxed on each access, of `images` that are decoded on each access.

    Indices give what they give of `images`.
    """

    dtype = np.dtype(np.uint8)
    ndim = 4

    def __init__(self, images: Any, height: int, width: int) -> None:
        self._images, self._size = images, (height, width)
        self.shape = (len(images), height, width, 3)

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape))

    def __getitem__(self, i: Any) -> Any:
        chosen = self._images[i]
        return self._scaled(chosen) if isinstance(i, int | np.integer) else type(self)(chosen, *self._size)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("the images are decoded: there is no array to share")
        out = self._scaled(np.asarray(self._images))
        return out if dtype is None else out.astype(dtype)

    def _scaled(self, images: np.ndarray) -> np.ndarray:
        # Others are of a file that changed: its reader sees the wrong size.
        same = images.shape[-3:] == tuple(self._images.shape[1:])
        return letterbox(images, *self._size) if same else images


class LetterboxedFrames(LetterboxedImages, Frames):
    """The same of `Frames`."""

    _images: Frames

    def encoded(self, i: int) -> None:
        """Return None: the stored file is of the other size."""

    def decode(self, at: int) -> np.ndarray:
        return self._scaled(self._images.decode(at))


def letterboxed(images: Any, height: int, width: int) -> Any:
    """Return `images` [N, H, W, 3], an array or decoded on access, with another size; an array is scaled at once."""
    if isinstance(images, np.ndarray):
        return letterbox(images, height, width)
    return (LetterboxedFrames if isinstance(images, Frames) else LetterboxedImages)(images, height, width)

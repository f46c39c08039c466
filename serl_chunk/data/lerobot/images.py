"""Frames on their way into a data set: encoded, or copied as they are stored; and what they look like on the whole."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import numpy as np

from serl_chunk.data.frames import Frames, SingleFrame, decode_image

SAMPLED = 8  # frames of an episode and camera that go into the statistics
_WIDEST = 160  # pixels of a frame's side that go into them, about
_PNG_LEVEL = 1  # zlib's: files 10 to 20 % larger than at 6, in a quarter of the time


def encode_png(image: np.ndarray) -> bytes:
    """A PNG file of uint8[H, W, 3]."""
    return _encode(image, format="PNG", compress_level=_PNG_LEVEL)


def encode_jpeg(image: np.ndarray, quality: int) -> bytes:
    """A JPEG file of uint8[H, W, 3], colour at full resolution."""
    return _encode(image, format="JPEG", quality=quality, subsampling=0)


def _encode(image: np.ndarray, **options: Any) -> bytes:
    from PIL import Image  # slow to import

    out = io.BytesIO()
    height, width, _ = image.shape
    picture = Image.new("RGB", (width, height), None)  # not filled: of small frames that takes a tenth of the time
    picture.frombytes(np.ascontiguousarray(image).data)
    picture.save(out, **options)
    return out.getvalue()


def newest(ticks: np.ndarray, n: int) -> np.ndarray:
    """int[n]: for every tick the number of the newest frame, of those read at `ticks` int[M >= 1].

    LeRobot wants a frame on every row. Before the first one it is the first.
    """
    return np.maximum(np.searchsorted(ticks, np.arange(n), side="right") - 1, 0)


def files(frames: np.ndarray | Frames, codec: str, quality: int) -> Iterator[tuple[bytes, np.ndarray | None]]:
    """The image file of every frame: the stored one where there is one, else a new one ("png" or "jpeg").

    Beside a new one, the frame uint8[H, W, 3] that it was made of.
    """
    for i in range(len(frames)):
        stored = frames.encoded(i) if isinstance(frames, Frames) else None
        if stored is not None:
            yield stored.data, None
        else:
            image = frames[i]
            yield encode_png(image) if codec == "png" else encode_jpeg(image, quality), image


def file_of(image: np.ndarray | SingleFrame) -> bytes:
    """The image file of one frame that is not to lose anything: the stored one where there is one, else a PNG."""
    stored = image.encoded if isinstance(image, SingleFrame) else None
    return encode_png(np.asarray(image)) if stored is None else stored.data


class Histogram:
    """How often each value occurs in a sample of an episode's frames.

    The sample is the same for the same number of frames, so that an episode converted anew becomes the same bytes.

    Args:
        n: frames of the episode.
    """

    def __init__(self, n: int) -> None:
        chosen = np.random.default_rng(n).choice(n, min(n, SAMPLED), replace=False)
        self._chosen = frozenset(chosen.tolist())
        self.frames = len(self._chosen)
        self.counts = np.zeros((3, 256), np.int64)

    def wants(self, i: int) -> bool:
        """Whether frame `i` is in the sample."""
        return i in self._chosen

    def add(self, image: np.ndarray | bytes, where: str) -> None:
        """Count the pixels (every k-th of a large frame) of one frame, decoded or a file; raises DataError."""
        pixels = decode_image(image, where) if isinstance(image, bytes) else image
        pixels = pixels[:: max(1, pixels.shape[0] // _WIDEST), :: max(1, pixels.shape[1] // _WIDEST)]
        for channel in range(3):
            self.counts[channel] += np.bincount(pixels[..., channel].ravel(), minlength=256)

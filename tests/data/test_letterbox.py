"""Frames of another size: openpi's pixels, and lazy ones that are scaled when they are decoded."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from deferred_episodes import Files

from serl_chunk.data.frames import Frames
from serl_chunk.data.letterbox import letterbox, letterboxed
from serl_chunk.transport.wire.jpeg import encode_jpeg, jpeg_images

ARRAYS = np.load(Path(__file__).parent / "pi0_transforms" / "transforms.npz")
IMAGES = ARRAYS["resize/uint8"]  # [2, 48, 64, 3]
RNG = np.random.default_rng


@pytest.mark.parametrize("side", [56, 224])
def test_the_pixels_are_openpis(side):
    expected = ARRAYS[f"resize/pil_{side}"]
    for frames, of in ((IMAGES, expected), (IMAGES[1], expected[1]), (IMAGES[None], expected[None])):
        np.testing.assert_array_equal(letterbox(frames, side, side), of)
    assert letterbox(IMAGES, 48, 64) is IMAGES  # of the size: not copied


@pytest.mark.parametrize(
    ("given", "size", "inner"),
    [
        ((48, 64), (56, 56), (slice(7, 49), slice(0, 56))),
        ((4, 4), (7, 4), (slice(1, 5), slice(0, 4))),  # the odd row is below
        ((2, 200), (10, 10), (slice(4, 5), slice(0, 10))),  # a row at least
    ],
)
def test_bars_are_black_and_the_frame_is_in_the_middle(given, size, inner):
    out = letterbox(np.full((*given, 3), 200, np.uint8), *size)
    expected = np.zeros((*size, 3), np.uint8)
    expected[inner] = 200
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("lazily", [Files, lambda images: jpeg_images(*encode_jpeg(images, 90), "top")])
def test_lazy_frames_are_scaled_when_they_are_decoded(lazily):
    inner = lazily(RNG(0).integers(0, 256, (5, 6, 8, 3), np.uint8))
    expected = letterbox(np.asarray(inner), 4, 4)
    lazy = letterboxed(inner, 4, 4)
    assert isinstance(lazy, Frames) == isinstance(inner, Frames)
    assert (lazy.shape, lazy.dtype, lazy.ndim, len(lazy), lazy.nbytes) == ((5, 4, 4, 3), np.uint8, 4, 5, 5 * 48)
    np.testing.assert_array_equal(np.asarray(lazy), expected)
    np.testing.assert_array_equal(lazy[3], expected[3])
    for part in (slice(1, 4), np.array([4, 0]), np.arange(5) % 2 == 0):
        assert lazy[part].shape == expected[part].shape
        np.testing.assert_array_equal(np.asarray(lazy[part]), expected[part])
    np.testing.assert_array_equal(np.asarray(pickle.loads(pickle.dumps(lazy))), expected)
    if isinstance(lazy, Frames):
        assert lazy.encoded(0) is None
        np.testing.assert_array_equal(lazy[1:].decode(0), expected[0])  # by the position in the file

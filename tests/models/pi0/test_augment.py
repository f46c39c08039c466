"""Random changes of images: their distribution, and what they leave alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from serl_chunk.models.pi0.augment import ANGLE, Draws, augmented, draws

SIZE = 40
changed = jax.jit(augmented)
STILL = {"place": 0.0, "angle": 0.0, "brightness": 0.0, "contrast": 0.0, "hue": 0.0, "coloured": True}


def drawn(count=1, **changes) -> Draws:
    values = STILL | changes
    return Draws(
        **{k: jnp.asarray(np.broadcast_to(v, (count, 2) if k == "place" else count)) for k, v in values.items()}
    )


def noise(seed=0, count=1):
    return np.random.default_rng(seed).integers(0, 256, (count, SIZE, SIZE, 3)).astype(np.uint8)


def unit(image):
    return (np.asarray(image) + 1) / 2


def one(image, camera="base_0_rgb", **changes):
    return unit(changed({camera: image}, drawn(len(image), **changes))[camera])


def test_draws_are_uniform_in_openpis_ranges():
    some = jax.jit(draws, static_argnums=1)(jax.random.key(0), 4000)
    limits = {"angle": ANGLE, "brightness": 0.3, "contrast": 0.4, "hue": 0.1, "place": 1.0}
    for name, limit in limits.items():
        x = np.asarray(getattr(some, name)).reshape(4000, -1)
        assert np.abs(x).max() <= limit
        np.testing.assert_allclose(x.mean(0), 0, atol=0.05 * limit)
        np.testing.assert_allclose(x.std(0), limit / np.sqrt(3), rtol=0.05)
    assert abs(np.mean(some.coloured) - 0.5) < 0.03
    columns = np.concatenate([np.asarray(x).reshape(4000, -1) for x in some], 1)
    np.testing.assert_allclose(np.corrcoef(columns.T), np.eye(7), atol=0.06)


def test_colours_without_draws_or_without_the_coin_stay_and_floats_are_bytes():
    image = noise()
    grey = np.full_like(image, 100)
    colours = {"brightness": 0.3, "contrast": -0.4, "hue": 0.1, "coloured": False}
    for given, shown, changes in (
        (image, image, {}),
        (image.astype(np.float32) / 255 * 2 - 1, image, {}),
        (grey, grey, {"hue": 0.1}),
        (image, image, colours),
    ):
        np.testing.assert_allclose(one(given, "left_wrist_0_rgb", **changes), shown / 255, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "colour", "expected"),
    [
        ({"brightness": 0.3}, [102] * 3, [0.4 * 0.7 + 0.3] * 3),  # towards white
        ({"brightness": -0.3}, [102] * 3, [0.4 * 0.7] * 3),  # towards black
        ({"hue": 1 / 3}, [255, 0, 0], [0, 1, 0]),  # round the colour circle
        ({"hue": 1 / 6}, [255, 0, 0], [1, 1, 0]),
    ],
)
def test_brightness_and_hue_move_colours(changes, colour, expected):
    image = np.broadcast_to(np.array(colour, np.uint8), (1, 8, 8, 3))
    np.testing.assert_allclose(one(image, "wrist", **changes)[0, 0, 0], expected, atol=1e-6)


def test_contrast_keeps_black_middle_and_white_and_spreads_or_narrows_the_middle():
    values = np.array([0.0, 0.45, 0.5, 0.55, 1.0], np.float32)
    row = np.broadcast_to(values[None, None, :, None] * 2 - 1, (1, 1, 5, 3))
    for contrast in (0.4, -0.4):
        slant = np.tan((1 + contrast) * np.pi / 4)
        out = one(row, "wrist", contrast=contrast)[0, 0, :, 0]
        np.testing.assert_allclose(out, [0, 0.5 - 0.05 * slant, 0.5, 0.5 + 0.05 * slant, 1], atol=1e-6)
        assert (np.diff(out) > 0).all()


def ramp():
    """Each pixel's value is its place: red its row, green its column."""
    y, x = np.mgrid[:SIZE, :SIZE] / SIZE
    return (np.stack([y, x, y * 0], -1)[None] * 2 - 1).astype(np.float32)


def test_a_crop_shows_95_percent_of_a_side_from_edge_to_edge():
    for place, offset in ((-1.0, -1.0), (0.0, 0.0), (0.5, 0.5), (1.0, 1.0)):
        out = one(ramp(), place=place, coloured=False)[0] * SIZE
        centre = (SIZE - 1) / 2 + offset  # 2 of 40 pixels are cut
        expected = (np.arange(SIZE) - (SIZE - 1) / 2) * 0.95 + centre
        np.testing.assert_allclose(out[2:-2, 5, 0], expected[2:-2], atol=1e-3)
        np.testing.assert_allclose(out[5, 2:-2, 1], expected[2:-2], atol=1e-3)


def test_a_rotation_turns_about_the_centre():
    out = one(ramp(), angle=5.0, coloured=False)[0] * SIZE - (SIZE - 1) / 2
    y, x = np.mgrid[:SIZE, :SIZE] - (SIZE - 1) / 2
    angle, inner = np.deg2rad(5.0), np.s_[5:-5, 5:-5]
    np.testing.assert_allclose(out[..., 0][inner], (0.95 * (np.cos(angle) * y + np.sin(angle) * x))[inner], atol=1e-3)
    np.testing.assert_allclose(out[..., 1][inner], (0.95 * (np.cos(angle) * x - np.sin(angle) * y))[inner], atol=1e-3)


def test_what_rotates_in_from_outside_is_black():
    white = np.full((1, SIZE, SIZE, 3), 255, np.uint8)
    out = one(white, angle=5.0, place=1.0, coloured=False)[0]
    assert out.min() == 0
    assert np.mean(out == 1) > 0.8


def test_cameras_of_a_sample_change_alike_and_wrists_keep_their_place():
    image = noise(count=6)
    some = draws(jax.random.key(3), 6)
    names = ("base_0_rgb", "base_1_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
    out = changed(dict.fromkeys(names, image), some)
    np.testing.assert_array_equal(out["base_0_rgb"], out["base_1_rgb"])
    np.testing.assert_array_equal(out["left_wrist_0_rgb"], out["right_wrist_0_rgb"])
    plain = ~np.asarray(some.coloured)
    assert plain.any()
    assert not plain.all()
    np.testing.assert_allclose(unit(out["left_wrist_0_rgb"])[plain], image[plain] / 255, atol=1e-6)
    assert not np.allclose(unit(out["base_0_rgb"])[plain], image[plain] / 255, atol=0.05)
    for x in out.values():
        assert x.dtype == np.float32
        assert np.abs(x).max() <= 1 + 1e-6

"""Random changes of training images in openpi's distribution: a crop, a rotation and colours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.ndimage import map_coordinates

CROP = 0.95  # of each side
ANGLE = 5.0  # degrees, at most
BRIGHTNESS, CONTRAST = 0.3, 0.4
# openpi sets neither: they are the defaults of its library, whose saturation has no effect.
HUE, COLOURED = 0.1, 0.5


class Draws(NamedTuple):
    """What changes the images of B samples, the same for all cameras of a sample."""

    place: jax.Array  # float32[B, 2] in [-1, 1): of the crop, from one edge to the other
    angle: jax.Array  # float32[B], degrees
    brightness: jax.Array  # float32[B], and so the next two
    contrast: jax.Array
    hue: jax.Array  # turns of the colour circle
    coloured: jax.Array  # bool[B]: whether the colours change at all


def draws(key: jax.Array, count: int) -> Draws:
    """Return draws for `count` samples."""
    keys = jax.random.split(key, len(Draws._fields))

    def within(number: int, limit: float, *shape: int) -> jax.Array:
        return jax.random.uniform(keys[number], (count, *shape), minval=-limit, maxval=limit)

    return Draws(
        within(0, 1.0, 2), within(1, ANGLE), within(2, BRIGHTNESS), within(3, CONTRAST), within(4, HUE),
        jax.random.bernoulli(keys[5], COLOURED, (count,)),
    )  # fmt: skip


def augmented(images: Mapping[str, jax.Array], drawn: Draws) -> dict[str, jax.Array]:
    """Return images as float32[B, H, W, 3] in [-1, 1].

    Args:
        images: by the model's name of the camera, uint8[B, H, W, 3] or float32 in [-1, 1]. Those of a camera with
            "wrist" in its name keep their place: such a camera moves, and what it sees has no place of its own.
        drawn: of the B samples.
    """

    def change(camera: str, image: jax.Array) -> jax.Array:
        unit = image.astype(jnp.float32) / 255 if image.dtype == jnp.uint8 else (image + 1) / 2
        if "wrist" not in camera:
            unit = jax.vmap(_moved)(unit, drawn.place, drawn.angle)
        return jax.vmap(_coloured)(unit, drawn) * 2 - 1

    return {camera: change(camera, image) for camera, image in images.items()}


def _moved(image: jax.Array, place: jax.Array, angle: jax.Array) -> jax.Array:
    """Crop, resize and rotate float32[H, W, 3] in one bilinear step; what lies outside is black."""
    size = jnp.array(image.shape[:2], jnp.float32)
    crop = jnp.array([int(side * CROP) for side in image.shape[:2]], jnp.float32)
    y, x = jnp.mgrid[: image.shape[0], : image.shape[1]].astype(jnp.float32) - (size[:, None, None] - 1) / 2
    cos, sin = jnp.cos(jnp.deg2rad(angle)), jnp.sin(jnp.deg2rad(angle))
    turned = jnp.stack([cos * y + sin * x, cos * x - sin * y])
    shift = place * (size - crop) / 2 + (size - 1) / 2
    at = turned * (crop / size)[:, None, None] + shift[:, None, None]
    sampled = jax.vmap(lambda channel: map_coordinates(channel, list(at), order=1), in_axes=-1, out_axes=-1)(image)
    return jnp.asarray(sampled)


def _coloured(image: jax.Array, drawn: Draws) -> jax.Array:
    """Change brightness, contrast and hue of float32[H, W, 3] in [0, 1], by the draws of one sample."""
    hue, saturation, value = _hsv(image)
    amount = drawn.brightness
    value = jnp.where(amount < 0, value * (1 + amount), value * (1 - amount) + amount)
    value = _contrasted(value, drawn.contrast)
    return jnp.where(drawn.coloured, _rgb(hue + drawn.hue, saturation, value), image)


def _contrasted(value: jax.Array, contrast: jax.Array) -> jax.Array:
    """A curve through 0, 1/2 and 1 of three lines, whose middle one has the slope `slant`."""
    slant = jnp.tan((contrast + 1) * jnp.pi / 4)
    low = slant / (2 * (1 + slant))
    middle = slant * (value - 0.5) + 0.5
    return jnp.where(value < low, value / slant, jnp.where(value > 1 - low, 1 + (value - 1) / slant, middle))


def _hsv(image: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return hue in turns, saturation and value of float32[..., 3], each [...]."""
    value, largest = image.max(-1), image.argmax(-1)
    spread = value - image.min(-1)
    following = jnp.take_along_axis(image, ((largest + 1) % 3)[..., None], -1)[..., 0]
    last = jnp.take_along_axis(image, ((largest + 2) % 3)[..., None], -1)[..., 0]
    hue = jnp.where(spread == 0, 0.0, (2 * largest + (following - last) / jnp.where(spread == 0, 1.0, spread)) / 6)
    return hue, jnp.where(value == 0, 0.0, spread / jnp.where(value == 0, 1.0, value)), value


def _rgb(hue: jax.Array, saturation: jax.Array, value: jax.Array) -> jax.Array:
    k = jnp.array([5.0, 3.0, 1.0]) + hue[..., None] * 6
    k -= 6 * jnp.floor(k / 6)  # k % 6, which compilers for CPUs do number by number
    ramp = jnp.clip(jnp.minimum(k, 4 - k), 0, 1)
    return value[..., None] * (1 - saturation[..., None] * ramp)

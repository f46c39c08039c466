"""The image tower, compared with a plain implementation."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pi0_models import CAMERAS, PlainPi0, Small, small

from serl_chunk.models.pi0 import siglip

IMAGE = f"images/{CAMERAS[0]}"


@pytest.fixture(scope="module")
def wide() -> Small:
    """Images that are no square and whose last pixels fill no patch."""
    return small("widths")


def test_every_stage_is_that_of_the_plain_tower(wide):
    image = wide.observation[IMAGE]
    ours = jax.jit(lambda p, x: siglip.stages(wide.config, p["PaliGemma"]["img"], x))(wide.params, image)
    plain = jax.jit(PlainPi0(wide.meta, wide.flat).siglip)(image)
    assert set(plain) == set(ours._fields)
    for name, stage in plain.items():
        np.testing.assert_allclose(getattr(ours, name), stage, atol=2e-5, err_msg=name)
    assert ours.stem.shape == (2, *wide.config.token_grid, wide.config.siglip.width)


def test_pixels_that_fill_no_patch_are_not_read(wide):
    image = np.array(wide.observation[IMAGE])
    height, width = (side * wide.config.siglip.patch for side in wide.config.token_grid)
    assert (height, width) != image.shape[1:3]
    changed = image.copy()
    changed[:, height:], changed[:, :, width:] = 9.0, 9.0
    tokens = [siglip.stages(wide.config, wide.params["PaliGemma"]["img"], x).tokens for x in (image, changed)]
    np.testing.assert_array_equal(*tokens)


def test_patches_are_embedded_in_float32_and_tokens_are_not(wide):
    config = dataclasses.replace(wide.config, dtype="bfloat16")
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), wide.params["PaliGemma"]["img"])
    ours = siglip.stages(config, half, wide.observation[IMAGE])
    assert [x.dtype.name for x in ours] == ["float32", "float32", "bfloat16", "bfloat16"]


def test_remat_and_unrolling_change_no_number(wide):
    def gradient(remat: bool, unroll: bool) -> jax.Array:
        config = dataclasses.replace(wide.config, remat=remat)
        image = jnp.asarray(wide.observation[IMAGE])
        total = lambda p: jnp.sum(siglip.stages(config, p, image, unroll).tokens ** 2)  # noqa: E731
        return jax.jit(jax.grad(total))(wide.params["PaliGemma"]["img"])["embedding"]["kernel"]

    first = gradient(True, False)
    for remat, unroll in ((False, False), (True, True)):
        np.testing.assert_allclose(gradient(remat, unroll), first, rtol=1e-4, atol=1e-5)

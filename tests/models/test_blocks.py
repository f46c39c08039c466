"""Blocks change what is computed at once, not what comes out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from serl_chunk.models.convolutions import BLOCK_ROWS, map_blocks


@pytest.mark.parametrize("batch", [1, 7, 8, 9, 24, 27])
def test_every_element_comes_out_once_and_in_order(batch: int):
    tree = {"a": jnp.arange(batch * 2.0).reshape(batch, 2)}
    scale = jnp.arange(batch, dtype=jnp.float32)
    out = map_blocks(lambda t, s: t["a"] * s[:, None], (tree, scale), rows=BLOCK_ROWS // 4)
    assert np.array_equal(out, tree["a"] * scale[:, None])


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="only a CPU computes in blocks")
def test_no_more_rows_than_a_block_at_once():
    seen: list[int] = []

    def double(x: jax.Array) -> jax.Array:
        seen.append(len(x))
        return 2 * x

    map_blocks(double, (jnp.zeros(100),), rows=BLOCK_ROWS // 16)
    assert seen == [16, 4]
    map_blocks(double, (jnp.zeros(3),), rows=2 * BLOCK_ROWS)
    assert seen[2:] == [1]

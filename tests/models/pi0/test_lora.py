"""Low-rank additions, with the conventions that openpi's have."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from serl_chunk.models.pi0.gemma import FROM_HEADS, TO_HEADS, TO_SEVERAL, attention_product, mlp_product

TOKENS, WIDTH, HEADS, SIZE, RANK = 3, 5, 4, 6, 2


def drawn(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.fold_in(jax.random.key(0), sum(shape)), shape)


@pytest.mark.parametrize(
    ("equations", "x", "w"),
    [
        (TO_HEADS, (TOKENS, WIDTH), (HEADS, WIDTH, SIZE)),
        (TO_SEVERAL, (2, TOKENS, WIDTH), (2, HEADS, WIDTH, SIZE)),
    ],
)
def test_an_addition_to_heads_is_one_of_their_matrices(equations, x, w):
    leaf = {"w": drawn(*w), "lora_a": drawn(*w[:-1], RANK), "lora_b": drawn(*w[:-2], RANK, w[-1])}
    whole = {"w": leaf["w"] + 0.75 * leaf["lora_a"] @ leaf["lora_b"]}
    added = attention_product(equations, drawn(*x), leaf, RANK, 1.5)
    np.testing.assert_allclose(added, attention_product(equations, drawn(*x), whole, 0, 1.0), rtol=1e-4, atol=1e-5)


def test_heads_share_the_sum_of_b_on_their_way_out():
    x, w = drawn(TOKENS, HEADS, SIZE), drawn(HEADS, SIZE, WIDTH)
    leaf = {"w": w, "lora_a": drawn(HEADS, SIZE, RANK), "lora_b": drawn(HEADS, RANK, WIDTH)}
    whole = {"w": w + 2.0 * leaf["lora_a"] @ leaf["lora_b"].sum(0)}
    added = attention_product(FROM_HEADS, x, leaf, RANK, 4.0)
    np.testing.assert_allclose(added, attention_product(FROM_HEADS, x, whole, 0, 1.0), rtol=1e-4, atol=1e-4)


def test_the_mlps_addition_is_not_scaled_and_belongs_to_one_matrix():
    leaf = {
        "gating_einsum": drawn(2, WIDTH, SIZE),
        "gating_einsum_lora_a": drawn(2, WIDTH, RANK),
        "gating_einsum_lora_b": drawn(2, RANK, SIZE),
    }
    x = drawn(TOKENS, WIDTH)
    for part in range(2):
        w, a, b = (leaf[name][part] for name in leaf)
        np.testing.assert_allclose(mlp_product(x, leaf, "gating_einsum", RANK, part), x @ (w + a @ b), rtol=1e-4)
    np.testing.assert_allclose(mlp_product(x, {"linear": w}, "linear", 0), x @ w, rtol=1e-5)


def test_products_are_computed_in_the_inputs_dtype():
    leaf = {"w": drawn(HEADS, WIDTH, SIZE), "lora_a": drawn(HEADS, WIDTH, RANK), "lora_b": drawn(HEADS, RANK, SIZE)}
    out = attention_product(TO_HEADS, drawn(TOKENS, WIDTH).astype(jnp.bfloat16), leaf, RANK, 16.0)
    assert out.dtype == jnp.bfloat16

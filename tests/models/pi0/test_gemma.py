"""The two experts: what tokens see, one softmax over several sources, rotations, norms, and low-rank additions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from serl_chunk.models.pi0 import gemma
from serl_chunk.models.pi0.gemma import FROM_HEADS, TO_HEADS, TO_SEVERAL, Source, attention_product, mlp_product
from serl_chunk.models.pi0.masks import attention_mask, positions, suffix_opens

B, N, T, S, KEY_HEADS, GROUPS, SIZE = 2, 3, 4, 5, 2, 3, 8


def drawn(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def test_two_sources_are_attended_to_as_one():
    q = drawn(0, B, N, T, KEY_HEADS * GROUPS, SIZE)
    shared = [drawn(i, B, S, KEY_HEADS, SIZE) for i in (1, 2)]
    own = [drawn(i, B, N, T, KEY_HEADS, SIZE) for i in (3, 4)]
    real, causal = np.array([[1, 1, 1, 0, 1], [0, 1, 1, 1, 0]], bool), np.tril(np.ones((T, T), bool))

    @jax.jit
    def both(q, shared, own):
        ours = gemma.attend(q, [Source(*shared, real[:, None, None]), Source(*own, causal[None, None])])
        repeated = [jnp.broadcast_to(x[:, None], (B, N, *x.shape[1:])) for x in shared]
        k, v = (jnp.repeat(jnp.concatenate(pair, 2), GROUPS, 3) for pair in zip(repeated, own, strict=True))
        mask = jnp.concatenate([jnp.broadcast_to(real[:, None], (B, T, S)), jnp.broadcast_to(causal, (B, T, T))], -1)
        logits = jnp.where(mask[:, None, None], jnp.einsum("bnthd,bnshd->bnhts", q, k), -jnp.inf)
        return ours, jnp.einsum("bnhts,bnshd->bnthd", jax.nn.softmax(logits), v)

    np.testing.assert_allclose(*both(q, shared, own), atol=1e-5)


def test_a_group_sees_itself_and_those_before_it_and_padding_takes_no_place():
    opens = jnp.array([0, 0, 1, 1, 0], bool)  # a prefix of two, a state, two actions
    seen = attention_mask(jnp.array([[1, 1, 1, 1, 1], [1, 0, 1, 1, 1]], bool), opens)
    whole = np.array([[1, 1, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 1, 1, 1, 1]], bool)
    np.testing.assert_array_equal(seen[0], whole)
    real = np.array([1, 0, 1, 1, 1], bool)
    np.testing.assert_array_equal(seen[1], whole & real[None] & real[:, None])
    np.testing.assert_array_equal(positions(jnp.array([[1, 0, 1, 1, 0]], bool)), [[0, 0, 1, 2, 2]])  # no place
    np.testing.assert_array_equal(suffix_opens(3, state=True), [True, True, False, False])
    np.testing.assert_array_equal(suffix_opens(3, state=False), [True, False, False])


# -- low-rank additions, with openpi's conventions ------------------------------------------------------------

TOKENS, WIDTH, HEADS, NUMBERS, RANK = 3, 5, 4, 6, 2


def of_shape(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.fold_in(jax.random.key(0), sum(shape)), shape)


@pytest.mark.parametrize(("equations", "x", "w"), [
    (TO_HEADS, (TOKENS, WIDTH), (HEADS, WIDTH, NUMBERS)), (TO_SEVERAL, (2, TOKENS, WIDTH), (2, HEADS, WIDTH, NUMBERS)),
])  # fmt: skip
def test_an_addition_to_heads_is_one_of_their_matrices(equations, x, w):
    leaf = {"w": of_shape(*w), "lora_a": of_shape(*w[:-1], RANK), "lora_b": of_shape(*w[:-2], RANK, w[-1])}
    whole = {"w": leaf["w"] + 0.75 * leaf["lora_a"] @ leaf["lora_b"]}
    added = attention_product(equations, of_shape(*x), leaf, RANK, 1.5)
    np.testing.assert_allclose(added, attention_product(equations, of_shape(*x), whole, 0, 1.0), rtol=1e-4, atol=1e-5)


def test_heads_share_the_sum_of_b_on_their_way_out():
    x, w = of_shape(TOKENS, HEADS, NUMBERS), of_shape(HEADS, NUMBERS, WIDTH)
    leaf = {"w": w, "lora_a": of_shape(HEADS, NUMBERS, RANK), "lora_b": of_shape(HEADS, RANK, WIDTH)}
    whole = {"w": w + 2.0 * leaf["lora_a"] @ leaf["lora_b"].sum(0)}
    added = attention_product(FROM_HEADS, x, leaf, RANK, 4.0)
    np.testing.assert_allclose(added, attention_product(FROM_HEADS, x, whole, 0, 1.0), rtol=1e-4, atol=1e-4)


def test_the_mlps_addition_is_not_scaled_and_belongs_to_one_matrix():
    leaf = {
        "gating_einsum": of_shape(2, WIDTH, NUMBERS),
        "gating_einsum_lora_a": of_shape(2, WIDTH, RANK),
        "gating_einsum_lora_b": of_shape(2, RANK, NUMBERS),
    }
    x = of_shape(TOKENS, WIDTH)
    for part in range(2):
        w, a, b = (leaf[name][part] for name in leaf)
        np.testing.assert_allclose(mlp_product(x, leaf, "gating_einsum", RANK, part), x @ (w + a @ b), rtol=1e-4)
    np.testing.assert_allclose(mlp_product(x, {"linear": w}, "linear", 0), x @ w, rtol=1e-5)

"""The two experts: what tokens see, one softmax over several sources, rotations, norms, and low-rank additions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pi0_models import Small, small

from serl_chunk.models.pi0 import gemma
from serl_chunk.models.pi0.gemma import FROM_HEADS, TO_HEADS, TO_SEVERAL, Source, attention_product, mlp_product
from serl_chunk.models.pi0.masks import attention_mask, positions, suffix_opens
from serl_chunk.models.pi0.tree import EXPERT, VLM

B, N, T, S, KEY_HEADS, GROUPS, SIZE = 2, 3, 4, 5, 2, 3, 8


def drawn(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


@pytest.fixture(scope="module")
def tiny() -> Small:
    return small("pi0")


def test_two_sources_are_attended_to_as_one():
    q = drawn(0, B, N, T, KEY_HEADS * GROUPS, SIZE)
    shared = [drawn(i, B, S, KEY_HEADS, SIZE) for i in (1, 2)]
    own = [drawn(i, B, N, T, KEY_HEADS, SIZE) for i in (3, 4)]
    real, causal = jnp.array([[1, 1, 1, 0, 1], [0, 1, 1, 1, 0]], bool), jnp.tril(jnp.ones((T, T), bool))
    ours = gemma.attend(q, [Source(*shared, real[:, None, None]), Source(*own, causal[None, None])])

    repeated = [jnp.broadcast_to(x[:, None], (B, N, *x.shape[1:])) for x in shared]
    k, v = (jnp.repeat(jnp.concatenate(pair, 2), GROUPS, 3) for pair in zip(repeated, own, strict=True))
    mask = jnp.concatenate([jnp.broadcast_to(real[:, None], (B, T, S)), jnp.broadcast_to(causal, (B, T, T))], -1)
    logits = jnp.where(mask[:, None, None], jnp.einsum("bnthd,bnshd->bnhts", q, k), -jnp.inf)
    np.testing.assert_allclose(ours, jnp.einsum("bnhts,bnshd->bnthd", jax.nn.softmax(logits), v), atol=1e-5)


def test_a_token_that_sees_nothing_has_the_mean_of_all_sources():
    v = [drawn(i, B, S, KEY_HEADS, SIZE) for i in (0, 1)]
    nothing = jnp.zeros((1, 1, 1, S), bool)
    q = drawn(2, B, 1, T, KEY_HEADS, SIZE)
    out = gemma.attend(q, [Source(x, x, nothing) for x in v])
    expected = jnp.concatenate(v, 1).mean(1)[:, None, None]
    np.testing.assert_allclose(out, jnp.broadcast_to(expected, out.shape), atol=1e-5)


def test_rotations_leave_products_of_equal_distances():
    x, y = drawn(0, 1, 1, SIZE), drawn(1, 1, 1, SIZE)

    def product(i: int, j: int) -> jax.Array:
        at = [gemma._rotated(v, gemma.rotation(jnp.array([p]), SIZE)) for v, p in ((x, i), (y, j))]
        return jnp.sum(at[0] * at[1])

    np.testing.assert_allclose(product(3, 7), product(103, 107), rtol=1e-4)
    np.testing.assert_allclose(product(0, 0), jnp.sum(x * y), rtol=1e-5)
    assert abs(product(3, 7) - product(3, 8)) > 1e-3


def test_an_adaptive_norm_scales_shifts_and_gates_by_its_condition():
    x, cond = drawn(0, B, T, 6), drawn(1, B, 1, 6)
    leaf = {"Dense_0": {"kernel": drawn(2, 6, 18), "bias": drawn(3, 18)}}
    y, gate = gemma.norm(leaf, x, cond)
    made = cond @ leaf["Dense_0"]["kernel"] + leaf["Dense_0"]["bias"]
    plain, none = gemma.norm({"scale": jnp.zeros(6)}, x)
    np.testing.assert_allclose(y, plain * (1 + made[..., :6]) + made[..., 6:12], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(gate, made[..., 12:], rtol=1e-5)
    assert none is None
    np.testing.assert_allclose(jnp.mean(plain**2, -1), 1.0, rtol=1e-4)


def test_layers_of_an_expert_have_the_names_of_the_first(tiny):
    layers = tiny.params["PaliGemma"]["llm"]["layers"]
    first, second = (gemma.layers_of(layers, end) for end in (VLM, EXPERT))
    assert jax.tree.structure(first) == jax.tree.structure(second)
    assert second["attn"]["q_einsum"]["w"] is layers["attn"]["q_einsum_1"]["w"]
    assert first["mlp"]["linear"] is layers["mlp"]["linear"]


def test_the_stream_before_the_last_layer_is_kept(tiny):
    tokens = drawn(0, B, S, tiny.config.vlm.width)
    arguments = tokens, jnp.ones((B, S, S), bool), jnp.broadcast_to(jnp.arange(S), (B, S))
    llm = tiny.params["PaliGemma"]["llm"]
    read = jax.jit(lambda *args: gemma.read(tiny.config, llm, *args))(*arguments)
    leaf = jax.tree.map(lambda x: x[-1], gemma.layers_of(llm["layers"], VLM))
    turned = gemma.rotation(arguments[2], tiny.config.head_dim)
    q, k, v, gate = gemma.attention_inputs(tiny.config, leaf, VLM, read.entering, turned)
    encoded = gemma.attend(q[:, None], [Source(k, v, arguments[1][:, None])])[:, 0]
    out = gemma.layer_output(tiny.config, leaf, VLM, read.entering, encoded, gate)
    np.testing.assert_allclose(gemma.last_norm(llm, VLM, out), read.out, atol=1e-5)
    np.testing.assert_allclose(k, read.keys[-1], atol=1e-5)


def test_text_is_scaled_by_the_root_of_its_width(tiny):
    table = tiny.params["PaliGemma"]["llm"]["embedder"]["input_embedding"]
    found = gemma.embedded(tiny.params["PaliGemma"]["llm"], jnp.array([[3, 0]]))
    np.testing.assert_allclose(found[0, 0], table[3] * table.shape[1] ** 0.5, rtol=1e-6)


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


@pytest.mark.parametrize(
    ("equations", "x", "w"),
    [
        (TO_HEADS, (TOKENS, WIDTH), (HEADS, WIDTH, NUMBERS)),
        (TO_SEVERAL, (2, TOKENS, WIDTH), (2, HEADS, WIDTH, NUMBERS)),
    ],
)
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


def test_products_are_computed_in_the_inputs_dtype():
    leaf = {
        "w": of_shape(HEADS, WIDTH, NUMBERS),
        "lora_a": of_shape(HEADS, WIDTH, RANK),
        "lora_b": of_shape(HEADS, RANK, NUMBERS),
    }
    out = attention_product(TO_HEADS, of_shape(TOKENS, WIDTH).astype(jnp.bfloat16), leaf, RANK, 16.0)
    assert out.dtype == jnp.bfloat16

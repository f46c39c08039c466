"""The language model: two experts of one transformer, of which the second attends to the first's keys and values.

`end` is VLM or EXPERT: what the names of an expert's parameters end with. Letters of shapes: B rows, N chunks of a row,
T or S tokens, D an expert's width, Q query heads, K key heads, G = Q / K, h numbers of a head, L layers.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from serl_chunk.config.agents.pi0 import Pi0Config, TransformerConfig
from serl_chunk.models.pi0.tree import EXPERT, LORA_A, LORA_B, VLM, Params

_MASKED = -2.3819763e38  # openpi's; a token that sees nothing has the mean of all values
_EPSILON = 1e-6
_LONGEST_WAVE = 10_000.0

Rotation = tuple[jax.Array, jax.Array]  # sines and cosines of the tokens' angles, float32[..., T, 1, h / 2]


class Source(NamedTuple):
    """Tokens that are attended to."""

    keys: jax.Array  # [B, N, S, K, h], or [B, S, K, h]: shared by all N
    values: jax.Array
    mask: jax.Array  # bool[B or 1, N or 1, T or 1, S]: what each query sees of them


class Read(NamedTuple):
    """What the first expert makes of the prefix."""

    keys: jax.Array  # [L, B, S, K, h], rotated
    values: jax.Array
    entering: jax.Array  # [B, S, D]: the residual stream before the last layer
    out: jax.Array  # [B, S, D]: after the last norm, which no velocity depends on


def embedded(llm: Params, tokens: jax.Array) -> jax.Array:
    """Return the embeddings of text int32[..., T], times the root of their width: [..., T, D]."""
    table = llm["embedder"]["input_embedding"]
    return table[tokens] * jnp.sqrt(table.shape[-1]).astype(table.dtype)


def rotation(positions: jax.Array, head_dim: int) -> Rotation:
    """Return the sines and cosines of rotary embeddings (Su et al. 2021) at int32[..., T]."""
    wave = _LONGEST_WAVE ** ((2.0 / head_dim) * jnp.arange(head_dim // 2, dtype=jnp.float32))
    angle = (positions[..., None] / wave)[..., None, :]
    return jnp.sin(angle), jnp.cos(angle)


def read(
    config: Pi0Config, llm: Params, tokens: jax.Array, mask: jax.Array, positions: jax.Array, unroll: bool = False
) -> Read:
    """Return what the first expert makes of the prefix.

    Args:
        llm: the tree below `PaliGemma/llm`.
        tokens: [B, S, D].
        mask: bool[B, S, S], row i is what token i sees.
        positions: int32[B, S].
    """
    turned = rotation(positions, config.head_dim)
    seen = mask[:, None]

    def layer(carry: tuple[jax.Array, jax.Array], leaf: Params) -> tuple[Any, Any]:
        x, _ = carry
        q, k, v, gate = attention_inputs(config, leaf, VLM, x, turned)
        encoded = attend(q[:, None], [Source(k, v, seen)])[:, 0]
        return (layer_output(config, leaf, VLM, x, encoded, gate), x), (k, v)

    x = tokens.astype(config.dtype)
    (x, entering), (keys, values) = _scan(config, layer, (x, x), llm, VLM, unroll)
    return Read(keys, values, entering, last_norm(llm, VLM, x))


def continued(
    config: Pi0Config,
    llm: Params,
    tokens: jax.Array,
    own: jax.Array,
    prefix: Source,
    positions: jax.Array,
    cond: jax.Array | None = None,
    unroll: bool = False,
) -> jax.Array:
    """Return what the second expert makes of its tokens [B, N, T, D] behind a prefix: [B, N, T, D], normalised.

    Args:
        own: bool[T, T], what its tokens see of each other.
        prefix: keys and values [L, B, S, K, h], which the N chunks share and no operation repeats.
        positions: int32[B, T].
        cond: of adaptive norms, [B, N, 1 or T, D].
    """
    turned = rotation(positions[:, None], config.head_dim)

    def layer(x: jax.Array, stacked: tuple[Params, jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        leaf, keys, values = stacked
        q, k, v, gate = attention_inputs(config, leaf, EXPERT, x, turned, cond)
        encoded = attend(q, [Source(keys, values, prefix.mask), Source(k, v, own[None, None])])
        return layer_output(config, leaf, EXPERT, x, encoded, gate, cond), None

    x = tokens.astype(config.dtype)
    x, _ = _scan(config, layer, x, llm, EXPERT, unroll, prefix.keys, prefix.values)
    return last_norm(llm, EXPERT, x, cond)


def _scan(
    config: Pi0Config, layer: Any, carry: Any, llm: Params, end: str, unroll: bool, *stacked: jax.Array
) -> tuple[Any, Any]:
    of_expert = layers_of(llm["layers"], end)
    body = jax.checkpoint(layer, prevent_cse=False) if config.remat else layer
    return jax.lax.scan(body, carry, (of_expert, *stacked) if stacked else of_expert, unroll=unroll)


def layers_of(layers: Params, end: str) -> Params:
    """Return the parameters of one expert, without the end of their names."""

    def own(tree: Params) -> Params:
        return {k.removesuffix(EXPERT): v for k, v in tree.items() if k.endswith(EXPERT) == (end == EXPERT)}

    return own({k: v for k, v in layers.items() if k != "attn"}) | {"attn": own(layers["attn"])}


def attention_inputs(
    config: Pi0Config, leaf: Params, end: str, x: jax.Array, turned: Rotation, cond: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Return what a layer attends with, by one layer's parameters `leaf`, of `layers_of`.

    That is rotated queries [..., T, Q, h], rotated keys and values [..., T, K, h], and the gate of the residual.
    """
    e, attn = _sizes(config, end), leaf["attn"]
    y, gate = norm(leaf["pre_attention_norm"], x, cond)
    rank, alpha = e.attention_rank, e.attention_alpha
    if "qkv_einsum" in attn:
        q, k, v = attention_product(TO_SEVERAL, y, attn["qkv_einsum"], rank, alpha)
    else:
        q = attention_product(TO_HEADS, y, attn["q_einsum"], rank, alpha)
        k, v = attention_product(TO_SEVERAL, y, attn["kv_einsum"], rank, alpha)
    return _rotated(q, turned) * config.head_dim**-0.5, _rotated(k, turned), v, gate


def layer_output(
    config: Pi0Config,
    leaf: Params,
    end: str,
    x: jax.Array,
    encoded: jax.Array,
    gate: jax.Array | None,
    cond: jax.Array | None = None,
) -> jax.Array:
    """Return a layer's output [..., T, D], given its input x and what its attention gave, [..., T, Q, h]."""
    e, mlp = _sizes(config, end), leaf["mlp"]
    out = attention_product(FROM_HEADS, encoded, leaf["attn"]["attn_vec_einsum"], e.attention_rank, e.attention_alpha)
    x = _residual(x, out, gate)
    y, gate = norm(leaf["pre_ffw_norm"], x, cond)
    hidden = jax.nn.gelu(mlp_product(y, mlp, "gating_einsum", e.mlp_rank, 0), approximate=True)
    hidden = hidden * mlp_product(y, mlp, "gating_einsum", e.mlp_rank, 1)
    return _residual(x, mlp_product(hidden, mlp, "linear", e.mlp_rank), gate)


def last_norm(llm: Params, end: str, x: jax.Array, cond: jax.Array | None = None) -> jax.Array:
    """Return the residual stream after the last layer, normalised."""
    return norm(llm[f"final_norm{end}"], x, cond)[0]


def _sizes(config: Pi0Config, end: str) -> TransformerConfig:
    return config.vlm if end == VLM else config.expert


def _residual(x: jax.Array, y: jax.Array, gate: jax.Array | None) -> jax.Array:
    return x + y if gate is None else x + y * gate


def norm(leaf: Params, x: jax.Array, cond: jax.Array | None = None) -> tuple[jax.Array, jax.Array | None]:
    """Divide x [..., T, D] by its root mean square, and scale it.

    `cond`: scale, shift and gate are functions of it. None: the scale is a parameter, and there is nothing else.
    Returns the normalised x, and the gate of the residual that is made of it: None without `cond`.
    """
    variance = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    normed = x * jnp.reciprocal(jnp.sqrt(variance + _EPSILON))
    if cond is None:
        return (normed * (1 + leaf["scale"])).astype(x.dtype), None
    dense = leaf["Dense_0"]
    made = cond.astype(x.dtype) @ dense["kernel"].astype(x.dtype) + dense["bias"].astype(x.dtype)
    scale, shift, gate = jnp.split(made, 3, axis=-1)
    return (normed * (1 + scale) + shift).astype(x.dtype), gate


def _rotated(x: jax.Array, turned: Rotation) -> jax.Array:
    sin, cos = turned
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def attend(queries: jax.Array, sources: Sequence[Source]) -> jax.Array:
    """Return the attention of queries [B, N, T, Q, h] to all sources under one softmax: [B, N, T, Q, h].

    Each source has a product of its own, so that what N chunks share is neither repeated nor concatenated.
    """
    b, n, t, heads, h = queries.shape
    kv_heads = sources[0].keys.shape[-2]
    grouped = queries.reshape(b, n, t, kv_heads, heads // kv_heads, h)

    def logits(source: Source) -> jax.Array:  # float32[B, K, N, T, G, S]
        keys = "bskh" if source.keys.ndim == 4 else "bnskh"
        found = jnp.einsum(f"bntkgh,{keys}->bkntgs", grouped, source.keys, preferred_element_type=jnp.float32)
        return jnp.where(source.mask[:, None, :, :, None, :], found, _MASKED)

    found = [logits(source) for source in sources]
    largest = functools.reduce(jnp.maximum, (jnp.max(x, axis=-1, keepdims=True) for x in jax.lax.stop_gradient(found)))
    powers = [jnp.exp(x - largest) for x in found]
    total = sum(jnp.sum(x, axis=-1, keepdims=True) for x in powers)
    out = jnp.zeros((), jnp.float32)
    for source, power in zip(sources, powers, strict=True):
        weights, values = (power / total).astype(queries.dtype), "bskh" if source.values.ndim == 4 else "bnskh"
        part = jnp.einsum(f"bkntgs,{values}->bntkgh", weights, source.values, preferred_element_type=jnp.float32)
        out = out + part
    return out.astype(queries.dtype).reshape(b, n, t, heads, h)


class Equations(NamedTuple):
    """Sums of a product with w, with A, and of the latter with B."""

    w: str
    a: str
    b: str


# Axes: t token, d width, n or k head, h number of a head, r rank, c query, key or value.
TO_HEADS = Equations("...td,ndh->...tnh", "...td,ndr->...tnr", "...tnr,nrh->...tnh")
TO_SEVERAL = Equations("...td,ckdh->c...tkh", "...td,ckdr->c...tkr", "c...tkr,ckrh->c...tkh")
FROM_HEADS = Equations("...tnh,nhd->...td", "...tnh,nhr->...tr", "...tr,nrd->...td")


def attention_product(
    equations: Equations, x: jax.Array, leaf: Mapping[str, jax.Array], rank: int, alpha: float
) -> jax.Array:
    """Return the product of x with `leaf["w"]`, plus alpha / rank times that with its A and B where rank is above 0."""
    out = jnp.einsum(equations.w, x, leaf["w"].astype(x.dtype))
    if rank == 0:
        return out
    small = jnp.einsum(equations.a, x, leaf[LORA_A].astype(x.dtype))
    return out + jnp.einsum(equations.b, small, leaf[LORA_B].astype(x.dtype)) * (alpha / rank)


def mlp_product(
    x: jax.Array, leaf: Mapping[str, jax.Array], name: str, rank: int, part: int | None = None
) -> jax.Array:
    """Return the product of x [..., D] with `leaf[name]` [D, F], plus that with its A and B where rank is above 0.

    `part`: takes one of the matrices that are stacked in the leaf.
    """
    named = (name, *((f"{name}_{LORA_A}", f"{name}_{LORA_B}") if rank else ()))
    w, *added = ((leaf[n] if part is None else leaf[n][part]).astype(x.dtype) for n in named)
    out = jnp.dot(x, w)
    return out + jnp.dot(jnp.dot(x, added[0]), added[1]) if added else out

"""The image tower: SigLIP's vision transformer, from images to tokens of the language model's width."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from serl_chunk.config.agents.pi0 import Pi0Config
from serl_chunk.models.pi0.tree import Params

_EPSILON = 1e-6


class Stages(NamedTuple):
    """What the tower makes of images, step by step."""

    stem: jax.Array  # float32[B, rows, columns, W]: the patches' embeddings
    with_posemb: jax.Array  # float32[B, S, W]
    encoded: jax.Array  # [B, S, W] in the computing dtype: after the layers and the last norm
    tokens: jax.Array  # [B, S, D] in the computing dtype; they are not scaled, unlike those of text


def stages(config: Pi0Config, params: Params, images: jax.Array, unroll: bool = False) -> Stages:
    """Return the stages of images float32[B, H, W, 3] in [-1, 1]. `params`: the tree below `PaliGemma/img`."""
    stem = _embedded(config, params["embedding"], images)
    x = stem.reshape(stem.shape[0], -1, stem.shape[-1])
    x = with_posemb = x + params["pos_embedding"].astype(jnp.float32)
    body = jax.checkpoint(_layer, prevent_cse=False) if config.remat else _layer
    layers = params["Transformer"]["encoderblock"]
    x, _ = jax.lax.scan(body, x.astype(config.dtype), layers, unroll=unroll)
    encoded = _layer_norm(params["Transformer"]["encoder_norm"], x)
    return Stages(stem, with_posemb, encoded, _dense(params["head"], encoded))


def _embedded(config: Pi0Config, leaf: Params, images: jax.Array) -> jax.Array:
    """One product over the numbers of each patch, in float32; pixels that fill no patch are left out."""
    (rows, columns), patch = config.token_grid, config.siglip.patch
    kernel, bias = (leaf[name].astype(jnp.float32) for name in ("kernel", "bias"))
    whole = images.astype(jnp.float32)[:, : rows * patch, : columns * patch]
    patches = whole.reshape(-1, rows, patch, columns, patch, 3).swapaxes(2, 3)
    flat = patches.reshape(-1, rows, columns, patch * patch * 3)
    return flat @ kernel.reshape(-1, kernel.shape[-1]) + bias[None, None, None]


def _layer(x: jax.Array, layer: Params) -> tuple[jax.Array, None]:
    x = x + _attention(layer["MultiHeadDotProductAttention_0"], _layer_norm(layer["LayerNorm_0"], x))
    mlp = layer["MlpBlock_0"]
    hidden = jax.nn.gelu(_dense(mlp["Dense_0"], _layer_norm(layer["LayerNorm_1"], x)), approximate=True)
    return x + _dense(mlp["Dense_1"], hidden), None


def _attention(leaf: Params, x: jax.Array) -> jax.Array:
    """Attention of all tokens of an image to each other; the softmax is in the computing dtype, as flax has it."""
    query, key, value = (_dense(leaf[name], x, "btd,dnh->btnh") for name in ("query", "key", "value"))
    query = query / jnp.sqrt(query.shape[-1]).astype(x.dtype)
    weights = jax.nn.softmax(jnp.einsum("bqnh,bknh->bnqk", query, key), axis=-1)
    return _dense(leaf["out"], jnp.einsum("bnqk,bknh->bqnh", weights, value), "btnh,nhd->btd")


def _dense(leaf: Params, x: jax.Array, equation: str = "btd,de->bte") -> jax.Array:
    return jnp.einsum(equation, x, leaf["kernel"].astype(x.dtype)) + leaf["bias"].astype(x.dtype)


def _layer_norm(leaf: Params, x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.maximum(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) - jnp.square(mean), 0.0)
    normed = (wide - mean) * (jax.lax.rsqrt(variance + _EPSILON) * leaf["scale"])
    return (normed + leaf["bias"]).astype(x.dtype)

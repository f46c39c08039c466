"""The parameters of a pi0: path, shape, dtype, initial values and group of each; which are trained; LoRA folded.

This is the only list of them. Trees are nested dicts; a path joins their names by "/".
"""

from __future__ import annotations

import dataclasses
import math
import re
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from serl_chunk.config.agents.pi0 import Pi0Config, TransformerConfig

Params = Any  # a nested dict of arrays
Group = Literal["siglip", "vlm", "vlm_lora", "expert", "expert_lora", "projections"]
VLM, EXPERT = "", "_1"  # what the names of an expert's parameters end with
LORA_A, LORA_B = "lora_a", "lora_b"

_LORA = r"(?:\w+_)?lora_[ab]"
_OF_EXPERT = r"PaliGemma/llm/(?:\w+/)*\w+_1/"
GROUPS: dict[Group, str] = {  # expressions that match a whole path; the first that does counts
    "siglip": r"PaliGemma/img/.*",
    "expert_lora": _OF_EXPERT + _LORA,
    "expert": _OF_EXPERT + r".*",
    "vlm_lora": rf"PaliGemma/llm/(?:\w+/)*{_LORA}",
    "vlm": r"PaliGemma/llm/.*",
    "projections": r"(?:state|action|time)_\w+/(?:kernel|bias)",
}


class Initial(NamedTuple):
    """A distribution of initial values; `scale` is a standard deviation, or the bound of `uniform`."""

    kind: Literal["zeros", "ones", "normal", "truncated", "uniform"]
    scale: float = 0.0

    def draw(self, key: jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
        if self.kind in ("zeros", "ones"):
            return jnp.full(shape, self.kind == "ones", dtype)
        if self.kind == "uniform":
            return jax.random.uniform(key, shape, jnp.float32, -self.scale, self.scale).astype(dtype)
        if self.kind == "normal":
            return (self.scale * jax.random.normal(key, shape, jnp.float32)).astype(dtype)
        drawn = jax.random.truncated_normal(key, -2.0, 2.0, shape, jnp.float32)
        return (self.scale / _OF_TRUNCATED * drawn).astype(dtype)


_OF_TRUNCATED = 0.87962566103423978  # standard deviation of a normal distribution that is cut at 2
_ZEROS, _ONES = Initial("zeros"), Initial("ones")


class Leaf(NamedTuple):
    """One parameter."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    initial: Initial
    group: Group


def _lecun(fan_in: int) -> Initial:
    return Initial("truncated", fan_in**-0.5)


def _xavier(fan_in: int, fan_out: int) -> Initial:
    return Initial("uniform", math.sqrt(6 / (fan_in + fan_out)))


Named = Iterator[tuple[str, tuple[int, ...], Initial]]  # (path, shape, initial values)


def _dense(name: str, before: int, after: int, lead: tuple[int, ...] = (), kernel: Initial | None = None) -> Named:
    yield f"{name}/kernel", (*lead, before, after), kernel or _lecun(before)
    yield f"{name}/bias", (*lead, after), _ZEROS


def _siglip(c: Pi0Config) -> Named:
    s, out = c.siglip, c.vlm.width
    w, lead, head = s.width, (s.depth,), s.width // s.heads
    yield "embedding/kernel", (s.patch, s.patch, 3, w), _lecun(3 * s.patch**2)
    yield "embedding/bias", (w,), _ZEROS
    yield "pos_embedding", (1, c.camera_tokens, w), Initial("normal", w**-0.5)
    for i in range(2):
        yield f"Transformer/encoderblock/LayerNorm_{i}/scale", (*lead, w), _ONES
        yield f"Transformer/encoderblock/LayerNorm_{i}/bias", (*lead, w), _ZEROS
    attention = "Transformer/encoderblock/MultiHeadDotProductAttention_0"
    for name in ("query", "key", "value"):
        yield f"{attention}/{name}/kernel", (*lead, w, s.heads, head), _xavier(w, w)
        yield f"{attention}/{name}/bias", (*lead, s.heads, head), _ZEROS
    yield f"{attention}/out/kernel", (*lead, s.heads, head, w), _xavier(w, w)
    yield f"{attention}/out/bias", (*lead, w), _ZEROS
    for i, (before, after) in enumerate(((w, s.mlp), (s.mlp, w))):
        name = f"Transformer/encoderblock/MlpBlock_0/Dense_{i}"
        yield f"{name}/kernel", (*lead, before, after), _xavier(before, after)
        yield f"{name}/bias", (*lead, after), Initial("normal", 1e-6)
    yield "Transformer/encoder_norm/scale", (w,), _ONES
    yield "Transformer/encoder_norm/bias", (w,), _ZEROS
    yield from _dense("head", w, out, kernel=_ZEROS)


def _norm(name: str, c: Pi0Config, e: TransformerConfig, end: str, lead: tuple[int, ...] = ()) -> Named:
    if c.pi05 and end == EXPERT:  # its scale, shift and gate are functions of the time
        yield from _dense(f"{name}{end}/Dense_0", e.width, 3 * e.width, lead, _ZEROS)
    else:
        yield f"{name}{end}/scale", (*lead, e.width), _ZEROS


def _lora(c: Pi0Config, name: str, shape: tuple[int, ...], rank: int) -> Named:
    """A (..., D, rank) and B (..., rank, F) of a product with (..., D, F); `name` ends with what is before `lora_a`."""
    if rank:
        small = Initial("normal", 0.01)
        yield f"{name}{LORA_A}", (*shape[:-1], rank), small
        yield f"{name}{LORA_B}", (*shape[:-2], rank, shape[-1]), small if c.lora_init == "openpi" else _ZEROS


def _transformer(c: Pi0Config, e: TransformerConfig, end: str) -> Named:
    lead, w = (c.depth,), e.width
    into: dict[str, tuple[int, ...]]
    if c.kv_heads == c.heads:  # then openpi has one product for all three
        into = {"qkv_einsum": (3, c.heads, w, c.head_dim)}
    else:
        into = {"q_einsum": (c.heads, w, c.head_dim), "kv_einsum": (2, c.kv_heads, w, c.head_dim)}
    products = {name: (shape, _lecun(w)) for name, shape in into.items()}
    products["attn_vec_einsum"] = ((c.heads, c.head_dim, w), _lecun(c.heads * c.head_dim))
    for name, (shape, initial) in products.items():
        yield f"layers/attn/{name}{end}/w", (*lead, *shape), initial
        yield from _lora(c, f"layers/attn/{name}{end}/", (*lead, *shape), e.attention_rank)
    of_mlp: dict[str, tuple[int, ...]] = {"gating_einsum": (2, w, e.mlp), "linear": (e.mlp, w)}
    for name, shape in of_mlp.items():
        yield f"layers/mlp{end}/{name}", (*lead, *shape), _lecun(shape[-2])
        yield from _lora(c, f"layers/mlp{end}/{name}_", (*lead, *shape), e.mlp_rank)
    for name in ("pre_attention_norm", "pre_ffw_norm"):
        yield from _norm(f"layers/{name}", c, e, end, lead)
    yield from _norm("final_norm", c, e, end)


def _projections(c: Pi0Config) -> Named:
    w = c.expert.width
    yield from _dense("action_in_proj", c.action_dim, w)
    yield from _dense("action_out_proj", w, c.action_dim)
    if not c.pi05:
        yield from _dense("state_proj", c.action_dim, w)
    time = "time_mlp" if c.pi05 else "action_time_mlp"
    yield from _dense(f"{time}_in", w if c.pi05 else 2 * w, w)
    yield from _dense(f"{time}_out", w, w)


def _below(name: str, named: Named) -> Named:
    return ((f"{name}/{path}", shape, initial) for path, shape, initial in named)


def leaves(config: Pi0Config) -> dict[str, Leaf]:
    """Return every parameter by its path, in the order of the paths."""
    named = [
        *_below("PaliGemma/img", _siglip(config)),
        ("PaliGemma/llm/embedder/input_embedding", (config.vocabulary, config.vlm.width), Initial("normal", 0.01)),
        *_below("PaliGemma/llm", _transformer(config, config.vlm, VLM)),
        *_below("PaliGemma/llm", _transformer(config, config.expert, EXPERT)),
        *_projections(config),
    ]
    return {
        path: Leaf(path, shape, "float32" if trains(config, path) else config.frozen_dtype, initial, group_of(path))
        for path, shape, initial in sorted(named)
    }


def group_of(path: str) -> Group:
    """Return the group of a parameter; raises StopIteration for a path that no pi0 has."""
    return next(group for group, pattern in GROUPS.items() if re.fullmatch(pattern, path))


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree of `path -> leaf`."""
    return unflatten_dict(dict(flat), sep="/")


def flat(tree: Params) -> dict[str, Any]:
    """Return `path -> leaf` of a tree."""
    return flatten_dict(tree, sep="/")


def shapes(config: Pi0Config) -> Params:
    """Return the tree with a `jax.ShapeDtypeStruct` for each array."""
    return nested({p: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for p, leaf in leaves(config).items()})


def initial(config: Pi0Config, key: jax.Array) -> Params:
    """Return initial parameters, distributed as openpi's; each leaf's key depends on its path alone."""
    return nested({path: initial_leaf(leaf, key) for path, leaf in leaves(config).items()})


def initial_leaf(leaf: Leaf, key: jax.Array) -> jax.Array:
    """Return initial values of one parameter."""
    key = jax.random.fold_in(key, zlib.crc32(leaf.path.encode()) & 0x7FFFFFFF)
    return leaf.initial.draw(key, leaf.shape, leaf.dtype)


def trains(config: Pi0Config, path: str) -> bool:
    """Return whether `config.trainable` has a parameter trained."""
    return group_of(path) in _trained(config)


def _trained(config: Pi0Config) -> tuple[Group, ...]:
    expert: tuple[Group, ...] = ("expert", "expert_lora")
    of: dict[str, tuple[Group, ...]] = {
        "full": tuple(GROUPS),
        "expert": (*expert, "projections"),
        "lora": ("vlm_lora", *(expert[1:] if config.expert.has_lora else expert), "projections"),
        "lora_expert": ("expert_lora", "projections"),
        "none": (),
    }
    return of[config.trainable]


def without_lora(config: Pi0Config) -> Pi0Config:
    """Return the model of the same sizes that has no LoRA."""
    vlm = dataclasses.replace(config.vlm, attention_rank=0, mlp_rank=0)
    expert = dataclasses.replace(config.expert, attention_rank=0, mlp_rank=0)
    return dataclasses.replace(config, vlm=vlm, expert=expert, trainable="full", lora_init="zero")


def folded(config: Pi0Config, params: Params) -> tuple[Params, list[str]]:
    """Return parameters of `without_lora(config)` that give the same velocities, and the paths of those that changed.

    w + alpha / rank * A B in the attention, with B summed over heads where heads are joined; w + A B in the MLP (Hu et
    al. 2021, with openpi's conventions; `gemma.attention_product`, `gemma.mlp_product`). Those are float32 on the host,
    made one layer at a time; the others are as they were.
    """
    out, changed = flat(params), []
    for path in [path for path in out if path.endswith(LORA_A)]:
        stem = path.removesuffix(LORA_A)
        a, b = out.pop(path), out.pop(stem + LORA_B)
        if stem.endswith("/"):  # of the attention
            expert = config.expert if group_of(path) == "expert_lora" else config.vlm
            target, scale = f"{stem}w", expert.attention_alpha / expert.attention_rank
        else:
            target, scale = stem.removesuffix("_"), 1.0
        w = np.array(out[target], np.float32)
        for layer in range(len(w)):
            first, second = (np.asarray(each[layer], np.float32) for each in (a, b))
            w[layer] += scale * first @ (second.sum(0) if "attn_vec_einsum" in stem else second)
        out[target] = w
        changed.append(target)
    return nested(out), sorted(changed)

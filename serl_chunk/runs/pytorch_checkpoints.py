"""`model.safetensors` of pi0 in PyTorch: openpi's conversion, and policies of LeRobot, such as its `pi0_base`.

Names and layouts are those of openpi's `convert_jax_model_to_pytorch.py`: Transformers' of PaliGemma and Gemma. A
tensor holds one layer. Norms have the same numbers as ours: both count 1 + weight.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from serl_chunk.models.pi0.tree import Leaf
from serl_chunk.types import DataError

_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_PALIGEMMA, _GEMMA = "paligemma_with_expert.paligemma.", "paligemma_with_expert.gemma_expert."
_TEXT, _EXPERT = f"{_PALIGEMMA}model.language_model.", f"{_GEMMA}model."
_EMBEDDING, _HEAD = f"{_TEXT}embed_tokens.weight", f"{_PALIGEMMA}lm_head.weight"  # one tensor; either may be left out
_UNUSED = (_HEAD, f"{_GEMMA}lm_head.weight")

# Our module -> theirs, and the axes of the weight of one layer: ours > theirs, which join some (n heads of h numbers; i
# in, o out). Several modules of theirs are stacked behind the layers in ours. "{}" is the layer.
_LINEAR, _HEADS_IN, _HEADS_OUT, _SCALE = "io>o,i", "inh>nh,i", "nho>o,nh", "i>i"
_VISION, _BLOCK = "vision_tower.vision_model.", "Transformer/encoderblock/"
_ATTENTION, _LAYER = f"{_BLOCK}MultiHeadDotProductAttention_0/", f"{_VISION}encoder.layers.{{}}."
_OF_IMAGES = {
    "embedding": (f"{_VISION}embeddings.patch_embedding", "hwio>o,i,h,w"),
    "pos_embedding": (f"{_VISION}embeddings.position_embedding", "ani>an,i"),
    f"{_BLOCK}LayerNorm_0": (f"{_LAYER}layer_norm1", _SCALE),
    f"{_BLOCK}LayerNorm_1": (f"{_LAYER}layer_norm2", _SCALE),
    f"{_ATTENTION}query": (f"{_LAYER}self_attn.q_proj", _HEADS_IN),
    f"{_ATTENTION}key": (f"{_LAYER}self_attn.k_proj", _HEADS_IN),
    f"{_ATTENTION}value": (f"{_LAYER}self_attn.v_proj", _HEADS_IN),
    f"{_ATTENTION}out": (f"{_LAYER}self_attn.out_proj", _HEADS_OUT),
    f"{_BLOCK}MlpBlock_0/Dense_0": (f"{_LAYER}mlp.fc1", _LINEAR),
    f"{_BLOCK}MlpBlock_0/Dense_1": (f"{_LAYER}mlp.fc2", _LINEAR),
    "Transformer/encoder_norm": (f"{_VISION}post_layernorm", _SCALE),
    "head": ("multi_modal_projector.linear", _LINEAR),
}
_OF_TEXT = {
    "embedder": ("embed_tokens", "oi>o,i"),
    "layers/attn/q_einsum": ("layers.{}.self_attn.q_proj", "nih>nh,i"),
    "layers/attn/kv_einsum": ("layers.{}.self_attn.k_proj layers.{}.self_attn.v_proj", "nih>nh,i"),
    "layers/attn/qkv_einsum": (" ".join(f"layers.{{}}.self_attn.{x}_proj" for x in "qkv"), "nih>nh,i"),
    "layers/attn/attn_vec_einsum": ("layers.{}.self_attn.o_proj", _HEADS_OUT),
    "layers/mlp/gating_einsum": ("layers.{}.mlp.gate_proj layers.{}.mlp.up_proj", _LINEAR),
    "layers/mlp/linear": ("layers.{}.mlp.down_proj", _LINEAR),
    "layers/pre_attention_norm": ("layers.{}.input_layernorm", _SCALE),
    "layers/pre_attention_norm/Dense_0": ("layers.{}.input_layernorm.dense", _LINEAR),
    "layers/pre_ffw_norm": ("layers.{}.post_attention_layernorm", _SCALE),
    "layers/pre_ffw_norm/Dense_0": ("layers.{}.post_attention_layernorm.dense", _LINEAR),
    "final_norm": ("norm", _SCALE),
    "final_norm/Dense_0": ("norm.dense", _LINEAR),
}

TENSOR_GROUPS = {  # part of a tensor's name -> its group (`tree.GROUPS`); the first counts
    "vision_tower": "siglip",
    "multi_modal_projector": "siglip",
    _GEMMA: "expert",
    _PALIGEMMA: "vlm",
    "_proj.": "projections",
    "time_mlp_": "projections",
    "": "unknown",
}


class Tensor(NamedTuple):
    """A tensor of theirs, and where it is in a parameter of ours."""

    name: str
    place: tuple[int, ...]  # its index in the parameter
    part: tuple[int, ...]  # the shape there
    axes: str

    @property
    def shape(self) -> tuple[int, ...]:
        ours, theirs = self.axes.split(">")
        sizes = dict(zip(ours, self.part, strict=True))
        return tuple(math.prod(sizes[axis] for axis in joined) for joined in theirs.split(","))

    def restored(self, array: np.ndarray) -> np.ndarray:
        """Return an array of `shape` as one of `part`, without a copy."""
        ours, theirs = self.axes.replace(",", "").split(">")
        split = array.reshape([self.part[ours.index(axis)] for axis in theirs])
        return split.transpose([theirs.index(axis) for axis in ours])


def tensors_of(leaf: Leaf) -> list[Tensor]:
    """Return the tensors that hold a parameter: none for LoRA, which such files have not."""
    module, last = leaf.path.removeprefix("PaliGemma/"), "weight"
    if module.endswith(("/kernel", "/bias", "/scale", "/w", "/input_embedding")):
        module, _, last = module.rpartition("/")
    before, names, axes = "", module, _LINEAR
    if module.startswith("img/"):
        before, (names, axes) = f"{_PALIGEMMA}model.", _OF_IMAGES[module.removeprefix("img/")]
    elif module.startswith("llm/"):
        before = _EXPERT if leaf.group.startswith("expert") else _TEXT
        names, axes = _OF_TEXT.get(re.sub(r"_1(?=/|$)", "", module.removeprefix("llm/")), ("", ""))
    stacked = names.split()
    lead = ("{}" in names) + (len(stacked) > 1)
    part = leaf.shape[lead:]
    if last == "bias":
        axes = "nh>nh" if len(part) == 2 else _SCALE
    last = "bias" if last == "bias" else "weight"
    return [
        Tensor(f"{before}{name.format(layer)}.{last}", (layer, i)[:lead], part, axes)
        for layer in range(leaf.shape[0] if lead else 1)
        for i, name in enumerate(stacked)
    ]


def assembled(leaf: Leaf, read: Callable[[str], np.ndarray]) -> np.ndarray:
    """Return a parameter; `read` returns a tensor in the parameter's dtype, and is called for one after the other."""
    tensors = tensors_of(leaf)
    if not tensors[0].place:
        return tensors[0].restored(read(tensors[0].name))
    out = np.empty(leaf.shape, np.dtype(leaf.dtype))
    for tensor in tensors:
        out[tensor.place] = tensor.restored(read(tensor.name))
    return out


class _Stored(NamedTuple):
    file: Path
    offset: int
    shape: tuple[int, ...]
    dtype: str

    def read(self, dtype: str) -> np.ndarray:
        stored = np.memmap(self.file, np.dtype(self.dtype), "r", self.offset, self.shape)
        return np.array(stored, np.dtype(dtype))


def stored_tensors(file: Path) -> Iterator[tuple[str, _Stored]]:
    """Iterate over (name, tensor that is not read yet) of a `.safetensors`, by openpi's names; no tied or unused head.

    The format is the length of a header, uint64, the header in JSON, and the numbers. Raises any of the errors that
    damage leads to.
    """
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if not 0 < length <= file.stat().st_size - 8:
            raise ValueError(f"its header would have {length} bytes")
        header: dict[str, Any] = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    named = {name.removeprefix("model."): found for name, found in header.items()}  # LeRobot's begin with it
    named.setdefault(_EMBEDDING, named.get(_HEAD))
    for name, found in named.items():
        if name in _UNUSED or found is None:
            continue
        if "state_proj.weight" in named:  # a pi0, of which older files have pi0.5's names
            name = re.sub(r"^time_mlp_", "action_time_mlp_", name)
        if found["dtype"] not in _DTYPES:
            raise DataError(
                f"{file}: {name} is {found['dtype']} (valid: {', '.join(_DTYPES)}). It is no parameter of a pi0: take "
                "a checkpoint of the model alone, without normalisation or quantisation"
            )
        dtype, (begin, end) = np.dtype(_DTYPES[found["dtype"]]), found["data_offsets"]
        if end - begin != math.prod(found["shape"]) * dtype.itemsize or 8 + length + end > file.stat().st_size:
            raise ValueError(f"{name} is cut off")
        yield name, _Stored(file, 8 + length + begin, tuple(found["shape"]), dtype.name)

"""`model.safetensors` of openpi's PyTorch and of LeRobot, written here from a model of ours, and read."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from errors import naming

from serl_chunk.config.agents.pi0 import PI0_PRESETS, Pi0Config
from serl_chunk.models.pi0.tree import flat, initial_leaf, leaves, without_lora
from serl_chunk.runs.openpi_checkpoints import Checkpoint
from serl_chunk.types import DataError

TINY = dataclasses.replace(PI0_PRESETS["tiny"], depth=2, heads=2, kv_heads=1)
BOTH, IMAGE = "paligemma_with_expert.", "paligemma_with_expert.paligemma.model.vision_tower.vision_model."
TEXT, EXPERT = f"{BOTH}paligemma.model.language_model.", f"{BOTH}gemma_expert.model."


def drawn(config: Pi0Config) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {path: rng.normal(size=leaf.shape).astype(np.float32) for path, leaf in leaves(config).items()}


def transformer(p: dict[str, np.ndarray], config: Pi0Config, end: str, to: str) -> dict[str, np.ndarray]:
    """Layers of one expert as Transformers' Gemma has them: a linear layer's weight is [out, in]."""
    out, llm = {}, "PaliGemma/llm/"

    def norm(ours: str, theirs: str, layer: int | None) -> None:
        at = slice(None) if layer is None else layer
        if f"{llm}{ours}{end}/scale" in p:
            out[f"{to}{theirs}.weight"] = p[f"{llm}{ours}{end}/scale"][at]
        else:
            out[f"{to}{theirs}.dense.weight"] = p[f"{llm}{ours}{end}/Dense_0/kernel"][at].T
            out[f"{to}{theirs}.dense.bias"] = p[f"{llm}{ours}{end}/Dense_0/bias"][at]

    for i in range(config.depth):
        at, attn = f"{to}layers.{i}.", f"{llm}layers/attn/"
        width = p[f"{attn}attn_vec_einsum{end}/w"].shape[-1]
        if f"{attn}qkv_einsum{end}/w" in p:
            q, k, v = p[f"{attn}qkv_einsum{end}/w"][i]
        else:
            q, (k, v) = p[f"{attn}q_einsum{end}/w"][i], p[f"{attn}kv_einsum{end}/w"][i]
        for name, heads in (("q", q), ("k", k), ("v", v)):  # heads [N, width, numbers], one below the other
            out[f"{at}self_attn.{name}_proj.weight"] = np.concatenate([head.T for head in heads])
        out[f"{at}self_attn.o_proj.weight"] = p[f"{attn}attn_vec_einsum{end}/w"][i].reshape(-1, width).T
        for name, matrix in zip(("gate", "up"), p[f"{llm}layers/mlp{end}/gating_einsum"][i], strict=True):
            out[f"{at}mlp.{name}_proj.weight"] = matrix.T
        out[f"{at}mlp.down_proj.weight"] = p[f"{llm}layers/mlp{end}/linear"][i].T
        norm("layers/pre_attention_norm", f"layers.{i}.input_layernorm", i)
        norm("layers/pre_ffw_norm", f"layers.{i}.post_attention_layernorm", i)
    norm("final_norm", "norm", None)
    return out


def as_pytorch(p: dict[str, np.ndarray], config: Pi0Config) -> dict[str, np.ndarray]:
    """Parameters by the names and in the layouts of openpi's PyTorch, with the head that the embedding is tied to."""
    img, width = "PaliGemma/img/", config.siglip.width
    block = f"{img}Transformer/encoderblock/"
    out = {
        f"{IMAGE}embeddings.patch_embedding.weight": np.moveaxis(p[f"{img}embedding/kernel"], (3, 2), (0, 1)),
        f"{IMAGE}embeddings.patch_embedding.bias": p[f"{img}embedding/bias"],
        f"{IMAGE}embeddings.position_embedding.weight": p[f"{img}pos_embedding"][0],
        f"{IMAGE}post_layernorm.weight": p[f"{img}Transformer/encoder_norm/scale"],
        f"{IMAGE}post_layernorm.bias": p[f"{img}Transformer/encoder_norm/bias"],
        f"{BOTH}paligemma.model.multi_modal_projector.linear.weight": p[f"{img}head/kernel"].T,
        f"{BOTH}paligemma.model.multi_modal_projector.linear.bias": p[f"{img}head/bias"],
        f"{BOTH}paligemma.lm_head.weight": p["PaliGemma/llm/embedder/input_embedding"],
        f"{BOTH}gemma_expert.lm_head.weight": np.ones((3, 2), np.float32),  # which no program reads
    }
    for i in range(config.siglip.depth):
        at = f"{IMAGE}encoder.layers.{i}."
        for n in (0, 1):
            out[f"{at}layer_norm{n + 1}.weight"] = p[f"{block}LayerNorm_{n}/scale"][i]
            out[f"{at}layer_norm{n + 1}.bias"] = p[f"{block}LayerNorm_{n}/bias"][i]
            out[f"{at}mlp.fc{n + 1}.weight"] = p[f"{block}MlpBlock_0/Dense_{n}/kernel"][i].T
            out[f"{at}mlp.fc{n + 1}.bias"] = p[f"{block}MlpBlock_0/Dense_{n}/bias"][i]
        for ours, theirs in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"), ("out", "out_proj")):
            of = f"{block}MultiHeadDotProductAttention_0/{ours}"
            out[f"{at}self_attn.{theirs}.weight"] = p[f"{of}/kernel"][i].reshape(width, width).T
            out[f"{at}self_attn.{theirs}.bias"] = p[f"{of}/bias"][i].reshape(width)
    out |= transformer(p, config, "", TEXT) | transformer(p, config, "_1", EXPERT)
    for path in p:
        if not path.startswith("PaliGemma"):
            name = path.replace("/kernel", ".weight").replace("/bias", ".bias")
            out[name] = p[path].T  # of a bias, itself
    return out


def write(file: Path, tensors: dict[str, np.ndarray]) -> Path:
    names = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, array in tensors.items():
        begin, data = len(data), data + np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": names[array.dtype.name], "shape": array.shape, "data_offsets": [begin, len(data)]}
    text = json.dumps(header).encode()
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return file


KINDS = {
    "openpi": lambda tensors: tensors,
    "lerobot": lambda tensors: {f"model.{name}": array for name, array in tensors.items()},
    "time_mlp": lambda tensors: {name.replace("action_time_mlp", "time_mlp"): array for name, array in tensors.items()},
    "untied": lambda tensors: {f"{TEXT}embed_tokens.weight": tensors[f"{BOTH}paligemma.lm_head.weight"]} | tensors
    | {f"{BOTH}paligemma.lm_head.weight": np.zeros((2, 2), np.float32)},
}  # fmt: skip


@pytest.mark.parametrize(("kind", "changes"), [
    *((kind, {}) for kind in KINDS), ("openpi", {"pi05": True}), ("lerobot", {"kv_heads": 2}),
])  # fmt: skip
def test_each_tensor_becomes_its_parameter(kind, changes, tmp_path):
    config = dataclasses.replace(TINY, **changes)
    params = drawn(config)
    file = write(tmp_path / "step" / "model.safetensors", KINDS[kind](as_pytorch(params, config)))
    for path in (file, file.parent):
        found = flat(Checkpoint(path).load(config))
        assert found.keys() == params.keys()
        for name, array in found.items():
            np.testing.assert_array_equal(array, params[name], err_msg=name)
            assert array.dtype == np.float32
    assert {Checkpoint(file).group_of(name) for name in Checkpoint(file).stored} == {
        "siglip", "vlm", "expert", "projections"
    }  # fmt: skip


def test_bfloat16_is_read_and_lora_is_new(tmp_path):
    config = dataclasses.replace(TINY, expert=dataclasses.replace(TINY.expert, attention_rank=2))
    params = drawn(without_lora(config))
    tensors = {name: array.astype(ml_dtypes.bfloat16) for name, array in as_pytorch(params, TINY).items()}
    file = write(tmp_path / "model.safetensors", tensors)
    for path, array in flat(Checkpoint(file).load(config, jax.random.key(0))).items():
        if path in params:
            expected = params[path].astype(ml_dtypes.bfloat16).astype(np.float32)
        else:
            expected = initial_leaf(leaves(config)[path], jax.random.key(0))
        np.testing.assert_array_equal(array, expected, err_msg=path)


LAYER = f"{EXPERT}layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({LAYER: None}, (LAYER, "missing", "agent.pi0")),
        ({f"{BOTH}paligemma.lm_head.weight": None}, (f"{TEXT}embed_tokens.weight", "missing")),
        ({LAYER: np.zeros((2, 3), np.float32)}, (LAYER, "(2, 3)", "(64, 128)")),
        ({"normalize_inputs.mean": np.zeros(2, np.float32)}, ("normalize_inputs.mean", "unknown")),
        (
            {f"action_{way}_proj.{part}": None for way in ("in", "out") for part in ("weight", "bias")}
            | {LAYER: None, "x": np.zeros(2, np.float32)},
            ("action_in_proj.bias", "action_in_proj.weight", "action_out_proj.weight", LAYER, "1 more"),
        ),
    ],
)
def test_all_tensors_that_do_not_fit_are_named(change, named, tmp_path):
    tensors = as_pytorch(drawn(TINY), TINY) | change
    file = write(tmp_path / "model.safetensors", {name: x for name, x in tensors.items() if x is not None})
    with pytest.raises(DataError, match=naming(file, *named)):
        Checkpoint(file).load(TINY)


AGAIN = ("cannot be read", "Copy it again")


@pytest.mark.parametrize(("damage", "named"), [
    (lambda b: b[:-1], AGAIN), (lambda b: b[:20], AGAIN), (lambda b: b"", AGAIN),
    (lambda b: b[:9] + b"!" + b[10:], AGAIN),
    (lambda b: b.replace(b"F32", b"I32", 1), ("action_in_proj.bias", "I32", "F64, F32, F16, BF16", "quantisation")),
])  # fmt: skip
def test_a_damaged_file_and_one_of_other_numbers_are_refused(damage, named, tmp_path):
    file = write(tmp_path / "model.safetensors", {"action_in_proj.bias": np.zeros(2, np.float32)})
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(DataError, match=naming(file, *named)):
        Checkpoint(file)

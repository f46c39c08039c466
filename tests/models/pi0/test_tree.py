"""The list of parameters: released trees, initial values, what is trained, and LoRA folded."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from pi0_models import pi0_best_of_n, small

from serl_chunk.config.agents.pi0 import PI0_PRESETS, Pi0Config
from serl_chunk.models.pi0.pi0 import Pi0
from serl_chunk.models.pi0.tree import (
    LORA_A,
    LORA_B,
    flat,
    folded,
    initial,
    initial_leaf,
    leaves,
    nested,
    shapes,
    trains,
    without_lora,
)

DATA = Path(__file__).resolve().parents[2] / "data" / "pi0_shapes"
RELEASED = {
    "pi0": "pi0_full",
    "pi05": "pi05_full",
    "pi0_lora": "pi0_lora_vlm_full_expert",
    "pi0_lora_both": "pi0_both_lora",
}
ROOT = Path(__file__).resolve().parents[3]
TINY = PI0_PRESETS["tiny"]


def with_lora(**changes: object) -> Pi0Config:
    vlm = dataclasses.replace(TINY.vlm, attention_rank=2, mlp_rank=3)
    expert = dataclasses.replace(TINY.expert, attention_rank=4, mlp_rank=5)
    return dataclasses.replace(TINY, **{"vlm": vlm, "expert": expert} | changes)


@pytest.mark.parametrize("preset", RELEASED)
def test_trees_of_the_presets_are_the_released_ones(preset):
    config = dataclasses.replace(PI0_PRESETS[preset], frozen_dtype="float32")
    tree = jax.eval_shape(lambda key: initial(config, key), jax.random.key(0))
    lines = [f"{path} {leaf.shape} {leaf.dtype}" for path, leaf in sorted(flat(tree).items())]
    assert lines == (DATA / f"{RELEASED[preset]}.txt").read_text().splitlines()
    assert shapes(config) == tree


@pytest.mark.parametrize(
    ("preset", "trainable", "trained", "documented"),
    [  # published sizes of what is trained, and whether docs/pi0.md has a row of it
        ("pi0", "full", 3_238_048_528, True),
        ("pi0", "expert", 314_713_120, True),
        ("pi0_lora_both", "lora", 53_235_744, True),
        ("pi0_lora_both", "lora_expert", 25_366_560, True),
        ("pi0_lora", "lora", 27_869_184 + 314_713_120, False),  # of the VLM, and all of the expert
    ],
)
def test_trainable_sets_have_the_published_and_the_documented_sizes(preset, trainable, trained, documented):
    config = dataclasses.replace(PI0_PRESETS[preset], trainable=trainable)
    counted: dict[bool, list] = {True: [], False: []}
    for leaf in leaves(config).values():
        counted[trains(config, leaf.path)].append(leaf)
    size = {trains: sum(math.prod(leaf.shape) for leaf in found) for trains, found in counted.items()}
    assert size[True] == trained
    assert {leaf.dtype for leaf in counted[True]} <= {"float32"}
    assert {leaf.dtype for leaf in counted[False]} <= {"bfloat16"}
    assert trainable == "full" or not any(leaf.group == "siglip" for leaf in counted[True])
    if not documented:
        return
    page = (ROOT / "docs" / "pi0.md").read_text()
    row = re.search(rf"^\| `{trainable}` \|.*\| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    assert row is not None
    millions, gigabytes, snapshot = map(float, row.groups())
    assert millions == round(size[True] / 1e6)
    # Weights, gradients and Adam's two averages in float32; the others in bfloat16.
    assert gigabytes == round((16 * size[True] + 2 * size[False]) / 1e9, 1)
    assert snapshot == pytest.approx(2 * size[True] / 1e6, abs=0.5)


def start(config: Pi0Config, path: str) -> np.ndarray:
    return np.asarray(initial_leaf(leaves(config)[path], jax.random.key(0)))


def test_initial_values_have_the_published_distributions():
    config = with_lora(lora_init="openpi")
    image, llm = "PaliGemma/img/", "PaliGemma/llm/"
    norm, layer = image + "Transformer/encoderblock/", llm + "layers/"
    for path, value in ((norm + "LayerNorm_0/scale", 1), (image + "head/kernel", 0), (layer + "pre_ffw_norm/scale", 0)):
        assert np.all(start(config, path) == value)
    for path, deviation in (
        (image + "embedding/kernel", (3 * 12**2) ** -0.5),
        (image + "pos_embedding", 64**-0.5),
        (norm + "MlpBlock_0/Dense_0/bias", 1e-6),
        (norm + "MultiHeadDotProductAttention_0/out/kernel", (2 / 128) ** 0.5),
        (llm + "embedder/input_embedding", 0.01),
        (layer + "attn/kv_einsum_1/w", 64**-0.5),
        (layer + "attn/attn_vec_einsum/w", 64**-0.5),  # heads x numbers of a head
        (layer + "mlp/linear", 128**-0.5),
        (layer + "mlp_1/gating_einsum_lora_a", 0.01),
        (layer + "attn/q_einsum/lora_b", 0.01),
        ("action_time_mlp_in/kernel", 128**-0.5),
    ):
        assert np.std(start(config, path)) == pytest.approx(deviation, rel=0.15), path


def test_a_leafs_initial_values_depend_on_its_path_alone():
    small, large = (dataclasses.replace(TINY, depth=d) for d in (2, 3))
    path, other = "action_in_proj/kernel", "state_proj/kernel"
    np.testing.assert_array_equal(start(small, path), start(large, path))
    assert not np.array_equal(start(small, path)[:, :32], start(small, other)[:, :32])


# -- the cost of a decision: the FLOP model of the benchmark, and what XLA counts of our program --------------------


def test_the_model_has_the_published_figures():
    assert pi0_best_of_n.prefix_flops(PI0_PRESETS["pi0"]) == pytest.approx(3.99e12, rel=0.005)
    assert pi0_best_of_n.step_flops(PI0_PRESETS["pi0"]) == pytest.approx(38.6e9, rel=0.005)
    assert pi0_best_of_n.shared_flops(PI0_PRESETS["pi0"], 1) == pytest.approx(4.38e12, rel=0.005)
    assert pi0_best_of_n.shared_flops(PI0_PRESETS["pi0"], 8) == pytest.approx(7.1e12, rel=0.01)
    assert pi0_best_of_n.shared_flops(PI0_PRESETS["pi0"], 32) == pytest.approx(16.3e12, rel=0.01)


def test_a_program_of_the_released_sizes_computes_what_the_model_says(monkeypatch):
    monkeypatch.setattr(pi0_best_of_n, "CANDIDATES", (1, 32))
    monkeypatch.setattr(pi0_best_of_n, "STEPS", 2)
    for figures in pi0_best_of_n.count_full().values():
        assert figures["lowered_flops"] == pytest.approx(figures["model_flops"], rel=0.02)


# -- LoRA folded into the weights: the same numbers, projection by projection ------------------------------------

CASE = small("lora")  # ranks and scales of its own in each product
TEXT = {name: array for name, array in CASE.observation.items() if not name.startswith("image")}


@functools.cache
def velocity(model: Pi0):
    x, t = CASE.inputs["x_t"], CASE.inputs["time"]
    run = jax.jit(lambda params: model.velocity(params, model.encode(params, TEXT), x, t))
    return lambda paths: run(nested(paths))


@pytest.mark.parametrize("path", [path for path in CASE.flat if path.endswith(LORA_B)])
def test_a_model_with_folded_lora_gives_the_same_velocity(path):
    alone = {p: x if p == path or not p.endswith(LORA_B) else 0 * x for p, x in CASE.flat.items()}
    plain = without_lora(CASE.config)
    whole, changed = folded(CASE.config, nested(alone))
    assert {p: leaf.shape for p, leaf in flat(whole).items()} == {p: leaf.shape for p, leaf in leaves(plain).items()}
    assert len(changed) == 10
    expected = velocity(CASE.model)(alone)
    np.testing.assert_allclose(velocity(Pi0(plain))(flat(whole)), expected, atol=1e-5)
    left_out = {p: x for p, x in alone.items() if not p.endswith((LORA_A, LORA_B))}
    assert np.abs(velocity(Pi0(plain))(left_out) - expected).max() > 1e-3

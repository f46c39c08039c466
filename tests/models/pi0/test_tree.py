"""The list of parameters: released trees, initial values, and what is trained."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from serl_chunk.config.agents.pi0 import PI0_PRESETS, Pi0Config
from serl_chunk.models.pi0.tree import GROUPS, Partition, flat, initial, leaves, partition, shapes

DATA = Path(__file__).resolve().parents[2] / "data" / "pi0_shapes"
RELEASED = {
    "pi0": "pi0_full", "pi05": "pi05_full", "pi0_lora": "pi0_lora_vlm_full_expert", "pi0_lora_both": "pi0_both_lora",
}  # fmt: skip
ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "serl_chunk"
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
    ("preset", "trainable", "trained"),
    [  # published sizes of what is trained
        ("pi0", "full", 3_238_048_528),
        ("pi05", "full", 3_353_433_872),
        ("pi0", "expert", 314_713_120),
        ("pi0_lora_both", "lora", 53_235_744),
        ("pi0_lora_both", "lora_expert", 25_366_560),
        ("pi0_lora", "lora", 27_869_184 + 314_713_120),  # of the VLM, and all of the expert
        ("pi0", "none", 0),
    ],
)
def test_trainable_sets_have_the_published_sizes(preset, trainable, trained):
    config = dataclasses.replace(PI0_PRESETS[preset], trainable=trainable)
    chosen = partition(config)
    counted = [leaf for leaf in leaves(config).values() if chosen.trains(leaf.path)]
    assert sum(math.prod(leaf.shape) for leaf in counted) == trained
    assert {leaf.dtype for leaf in counted} <= {"float32"}
    assert {leaf.dtype for leaf in leaves(config).values() if leaf not in counted} <= {"bfloat16"}
    assert trainable == "full" or not any(leaf.group == "siglip" for leaf in counted)


@pytest.mark.parametrize(
    ("preset", "trainable"),
    [("pi0", "full"), ("pi0", "expert"), ("pi0_lora_both", "lora"), ("pi0_lora_both", "lora_expert")],
)
def test_the_documented_sizes_are_those_of_the_shapes(preset, trainable):
    config = dataclasses.replace(PI0_PRESETS[preset], trainable=trainable)
    size = {True: 0, False: 0}
    for leaf in leaves(config).values():
        size[partition(config).trains(leaf.path)] += math.prod(leaf.shape)
    page = (ROOT / "docs" / "pi0.md").read_text()
    row = re.search(rf"^\| `{trainable}` \|.*\| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    assert row is not None
    millions, gigabytes, snapshot = map(float, row.groups())
    assert millions == round(size[True] / 1e6)
    # Weights, gradients and Adam's two averages in float32; the others in bfloat16.
    assert gigabytes == round((16 * size[True] + 2 * size[False]) / 1e9, 1)
    assert snapshot == pytest.approx(2 * size[True] / 1e6, abs=0.5)


def test_every_parameter_is_in_one_group():
    found = leaves(with_lora(pi05=True))
    assert {leaf.group for leaf in found.values()} == set(GROUPS)
    for leaf in found.values():
        assert re.search("lora", leaf.path) is None or leaf.group.endswith("_lora")
        assert ("_1/" in leaf.path and "llm" in leaf.path) == leaf.group.startswith("expert")


@pytest.mark.parametrize("trainable", ["full", "expert", "lora", "lora_expert", "none"])
def test_a_partition_splits_a_tree_and_puts_it_together_again(trainable):
    config = with_lora(trainable=trainable)
    params = initial(config, jax.random.key(0))
    trained, base = partition(config).split(params)
    assert flat(trained).keys() | flat(base).keys() == flat(params).keys()
    assert not flat(trained).keys() & flat(base).keys()
    merged = Partition.merge(trained, base)
    assert all(leaf is flat(params)[path] for path, leaf in flat(merged).items())
    assert merged.keys() == params.keys()


def test_a_leaf_in_both_trees_is_refused():
    with pytest.raises(ValueError, match="a/b"):
        Partition.merge({"a": {"b": 1}}, {"a": {"b": 2}})


def test_a_partition_matches_whole_paths():
    chosen = Partition((r"a/.*", r"b"))
    assert [chosen.trains(path) for path in ("a/x", "a", "b", "b/x", "xa/x")] == [True, False, True, False, False]


def test_initial_values_have_the_published_distributions():
    config = with_lora(lora_init="openpi")
    params = flat(initial(config, jax.random.key(0)))
    image, llm = "PaliGemma/img/", "PaliGemma/llm/"
    norm, layer = image + "Transformer/encoderblock/", llm + "layers/"
    assert jnp.all(params[norm + "LayerNorm_0/scale"] == 1)
    assert not jnp.any(params[image + "head/kernel"])
    assert not jnp.any(params[layer + "pre_ffw_norm/scale"])
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
        assert jnp.std(params[path]) == pytest.approx(deviation, rel=0.15), path


def test_a_new_lora_changes_nothing_unless_openpis_start_is_chosen():
    params = flat(initial(with_lora(), jax.random.key(0)))
    for path, leaf in params.items():
        assert not path.endswith("lora_b") or not jnp.any(leaf)
        assert not path.endswith("lora_a") or jnp.all(jnp.std(leaf) > 0)


def test_a_leafs_initial_values_depend_on_its_path_alone():
    small, large = (flat(initial(dataclasses.replace(TINY, depth=d), jax.random.key(0))) for d in (2, 3))
    np.testing.assert_array_equal(small["action_in_proj/kernel"], large["action_in_proj/kernel"])
    assert not np.array_equal(small["action_in_proj/kernel"][:, :32], small["state_proj/kernel"][:, :32])


def test_released_sizes_stand_in_the_list_and_the_presets_alone():
    files = [*(PACKAGE / "models" / "pi0").glob("*.py"), *(PACKAGE / "agents").glob("*.py")]
    files += [*(PACKAGE / "serving").glob("*.py"), PACKAGE / "runs" / "openpi_checkpoints.py"]
    found = [f.name for f in files if f.name != "tree.py" and re.search(r"\b(1152|2048|257_?152)\b", f.read_text())]
    assert found == []

"""Checkpoints of openpi: both layouts, PaliGemma's weights, what does not fit, memory, and the export."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from errors import naming

from serl_chunk.agents.partition import Partition
from serl_chunk.config.agents.pi0 import PI0_PRESETS, Pi0Config
from serl_chunk.models.pi0.tree import flat, initial, leaves, nested, trains
from serl_chunk.runs.openpi_checkpoints import Checkpoint, export
from serl_chunk.types import DataError

TINY = dataclasses.replace(PI0_PRESETS["tiny"], depth=2)
STATS = {"trossen": {name: {"mean": [0.0, 1.0], "std": [1.0, 2.0]} for name in ("state", "actions")}}
MODEL = "PaliGemma/llm/layers/mlp/linear"


def lora(**changes: Any) -> Pi0Config:
    vlm = dataclasses.replace(TINY.vlm, attention_rank=2, mlp_rank=2)
    return dataclasses.replace(TINY, vlm=vlm, trainable="lora", **changes)


@pytest.fixture(scope="module")
def params() -> dict[str, np.ndarray]:
    """Initial parameters, all different from zero."""
    tree = flat(initial(TINY, jax.random.key(0)))
    return {path: np.asarray(leaf) + np.float32(0.01) for path, leaf in tree.items()}


def save(folder: Path, params: dict[str, np.ndarray], *, value: bool = False) -> Path:
    """Write a checkpoint as openpi does: a released one, or with `value` a training one."""
    named = {f"params/{path}/value" if value else f"params/{path}": array for path, array in params.items()}
    ocp.PyTreeCheckpointer().save(folder / "params", args=ocp.args.PyTreeSave(nested(named)))
    return folder


@pytest.fixture(scope="module")
def released(params: dict[str, np.ndarray], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("released") / "step", params)


def same(tree: Any, expected: dict[str, np.ndarray]) -> bool:
    found = flat(tree)
    return found.keys() == expected.keys() and all(
        found[k].dtype == v.dtype and np.array_equal(found[k], v) for k, v in expected.items()
    )


@pytest.mark.parametrize("value", [False, True])
def test_both_layouts_are_read(params, tmp_path, value):
    folder = save(tmp_path / "step", params, value=value)
    for path in (folder, folder / "params"):
        checkpoint = Checkpoint(path)
        assert (checkpoint.stored.keys(), checkpoint.stored[MODEL].shape) == (params.keys(), params[MODEL].shape)
        assert checkpoint.stored[MODEL].dtype == "float32"
        assert same(checkpoint.load(TINY), params)


@pytest.mark.parametrize("stored", [np.float32, ml_dtypes.bfloat16])
def test_paligemmas_weights_leave_the_rest_at_its_initial_values(params, tmp_path, stored):
    of_paligemma = {p: a for p, a in params.items() if leaves(TINY)[p].group in ("siglip", "vlm")}
    file = tmp_path / "pt_224.npz"
    arrays = {path.replace("PaliGemma", "params"): array.astype(stored) for path, array in of_paligemma.items()}
    arrays["params/img/head/kernel"] = np.asfortranarray(arrays["params/img/head/kernel"])
    np.savez(file, **arrays)
    checkpoint = Checkpoint(file)
    assert checkpoint.stored[MODEL].dtype == np.dtype(stored).name
    found = flat(checkpoint.load(TINY, jax.random.key(1)))
    start = flat(initial(TINY, jax.random.key(1)))
    for path, leaf in found.items():
        expected = params[path].astype(stored).astype(np.float32) if path in of_paligemma else start[path]
        np.testing.assert_array_equal(leaf, expected, err_msg=path)
    with pytest.raises(DataError, match=naming(file, "PaliGemma/llm/final_norm_1/scale", "key")):
        checkpoint.load(TINY)


def test_a_lora_that_a_checkpoint_lacks_is_new(params, released):
    config = lora(lora_init="openpi")
    found = flat(Checkpoint(released).load(config, jax.random.key(2)))
    assert {path for path in found if path not in params} == {p for p in leaves(config) if "lora" in p}
    new = {path: leaf for path, leaf in flat(initial(config, jax.random.key(2))).items() if "lora" in path}
    assert all(np.array_equal(found[path], leaf) for path, leaf in new.items())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"state_proj/bias": None}, ("state_proj/bias", "missing")),
        ({"other_proj/bias": np.zeros(2)}, ("other_proj/bias", "unknown")),
        ({f"{MODEL}_lora_a": np.zeros(2)}, (f"{MODEL}_lora_a", "LoRA")),
        ({"state_proj/bias": None, MODEL: np.zeros(2)}, (MODEL, "(2,)", "state_proj/bias", "missing")),
        (
            {f"action_{way}_proj/{part}": None for way in ("in", "out") for part in ("kernel", "bias")}
            | {f"action_time_mlp_{way}/{part}": None for way in ("in", "out") for part in ("kernel", "bias")},
            ("pi0-FAST", "pi0_base"),
        ),
    ],
)
def test_parameters_that_do_not_fit_are_named(params, tmp_path, change, named):
    changed = {path: array for path, array in (params | change).items() if array is not None}
    folder = save(tmp_path / "step", changed)
    with pytest.raises(DataError, match=naming(folder, *named)):
        Checkpoint(folder).load(TINY)


def test_a_damaged_checkpoint_and_what_is_none_are_refused(params, tmp_path):
    with pytest.raises(DataError, match=naming(tmp_path, "params/_METADATA", ".npz")):
        Checkpoint(tmp_path)
    (tmp_path / "weights.npz").write_bytes(b"none")
    with pytest.raises(DataError, match=naming(tmp_path / "weights.npz", "cannot be read", "no archive")):
        Checkpoint(tmp_path / "weights.npz")
    folder = save(tmp_path / "step", params)
    for file in (folder / "params" / "ocdbt.process_0" / "d").iterdir():
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(DataError, match=naming(folder, "cannot be read")):
        Checkpoint(folder).load(TINY)


@pytest.mark.parametrize("trainable", ["lora", "none"])
def test_an_export_is_read_again(params, tmp_path, trainable):
    config = dataclasses.replace(lora(), trainable=trainable)
    whole = initial(config, jax.random.key(0))
    folder = tmp_path / "export"
    export(folder, config, *Partition(partial(trains, config)).split(whole), STATS)
    written = json.loads((folder / "assets" / "trossen" / "norm_stats.json").read_text())
    assert written == {"norm_stats": STATS["trossen"]}
    checkpoint = Checkpoint(folder)
    assert checkpoint.norm_stats() == STATS
    assert same(checkpoint.load(config), {k: np.asarray(v) for k, v in flat(whole).items()})
    raw = ocp.PyTreeCheckpointer().restore(folder / "params")  # as openpi reads it: below one name
    assert raw.keys() == {"params"}
    with pytest.raises(DataError, match=naming(folder, "Choose")):
        export(folder, config, whole, {})


RESTORED = """
import hashlib, json, sys
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from openpi.models.model import restore_params
found = flatten_dict(restore_params(sys.argv[1], restore_type=np.ndarray, dtype=jnp.dtype(sys.argv[2])), sep="/")
print(json.dumps({path: [list(a.shape), hashlib.sha256(a.tobytes()).hexdigest()] for path, a in found.items()}))
"""


@pytest.mark.slow
@pytest.mark.skipif("SERL_CHUNK_OPENPI" not in os.environ, reason="SERL_CHUNK_OPENPI names no Python with openpi")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_openpi_restores_an_export(tmp_path, dtype):
    config = lora()
    whole = initial(config, jax.random.key(0))
    export(tmp_path / "export", config, *Partition(partial(trains, config)).split(whole), STATS)
    command = [os.environ["SERL_CHUNK_OPENPI"], "-c", RESTORED, str(tmp_path / "export" / "params"), dtype]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    ours = {path: np.asarray(leaf).astype(jnp.dtype(dtype)) for path, leaf in flat(whole).items()}
    assert found == {path: [list(a.shape), hashlib.sha256(a.tobytes()).hexdigest()] for path, a in ours.items()}


def test_parameters_of_another_model_are_not_exported(params, tmp_path):
    tree = nested(params)
    with pytest.raises(DataError, match=naming("PaliGemma/llm/final_norm_1/Dense_0/bias", "missing")):
        export(tmp_path / "export", dataclasses.replace(TINY, pi05=True), tree, {})
    assert not (tmp_path / "export").exists()

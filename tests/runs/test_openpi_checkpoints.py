"""Checkpoints of openpi: both layouts, PaliGemma's weights, what does not fit, memory, and the export."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from errors import naming

from serl_chunk.config.agents.pi0 import PI0_PRESETS, Pi0Config
from serl_chunk.models.pi0.tree import flat, initial, leaves, nested, partition
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
        assert checkpoint.stored.keys() == params.keys()
        assert checkpoint.stored[MODEL].shape == params[MODEL].shape
        assert checkpoint.stored[MODEL].dtype == "float32"
        assert same(checkpoint.load(TINY), params)


def test_each_parameter_is_read_in_the_dtype_that_it_is_kept_in_the_largest_first(params, released):
    config = dataclasses.replace(TINY, trainable="expert", frozen_dtype="bfloat16")
    expected = {path: params[path].astype(leaf.dtype) for path, leaf in leaves(config).items()}
    assert {array.dtype.name for array in expected.values()} == {"float32", "bfloat16"}
    sizes: list[int] = []

    def place(leaf: Any, array: np.ndarray) -> jax.Array:
        sizes.append(array.size)
        return jnp.asarray(array)

    tree = Checkpoint(released).load(config, place=place)
    assert same(tree, expected)
    assert sizes == sorted(sizes, reverse=True)
    assert all(isinstance(leaf, jax.Array) for leaf in flat(tree).values())


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
        ({"state_proj/bias": None, MODEL: np.zeros(2)}, (MODEL, "(2,)")),  # the first in the order of paths
    ],
)
def test_the_first_parameter_that_does_not_fit_is_named(params, tmp_path, change, named):
    changed = {path: array for path, array in (params | change).items() if array is not None}
    folder = save(tmp_path / "step", changed)
    with pytest.raises(DataError, match=naming(folder, *named)):
        Checkpoint(folder).load(TINY)


def test_a_damaged_checkpoint_and_what_is_none_are_refused(params, tmp_path):
    with pytest.raises(DataError, match=naming(tmp_path, "params/_METADATA", ".npz")):
        Checkpoint(tmp_path)
    (tmp_path / "weights.npz").write_bytes(b"none")
    with pytest.raises(DataError, match=naming(tmp_path / "weights.npz", "cannot be read")):
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
    export(folder, config, *partition(config).split(whole), STATS)
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
    export(tmp_path / "export", config, *partition(config).split(whole), STATS)
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


LOADING = """
import dataclasses, sys, threading, time
from serl_chunk.config.agents.pi0 import PI0_PRESETS, ExpertConfig, SiglipConfig, VlmConfig
from serl_chunk.models.pi0.tree import flat
from serl_chunk.runs.openpi_checkpoints import Checkpoint

config = dataclasses.replace(
    PI0_PRESETS["tiny"], vocabulary=40_000, depth=12, vlm=VlmConfig(width=512, mlp=4096),
    expert=ExpertConfig(width=256, mlp=1024), siglip=SiglipConfig(width=256, depth=12, mlp=1024, heads=4, patch=12),
    trainable=sys.argv[2], frozen_dtype=sys.argv[3],
)
if sys.argv[1] == "export":
    import jax
    from serl_chunk.models.pi0.tree import initial
    from serl_chunk.runs.openpi_checkpoints import export
    export(sys.argv[4], config, jax.device_get(initial(config, jax.random.key(0))), {})
    sys.exit()
resident = lambda: int(open("/proc/self/statm").read().split()[1]) * 4096
checkpoint = Checkpoint(sys.argv[4])
checkpoint.stored["state_proj/bias"].read("float32")
before, peak, done = resident(), 0, threading.Event()

def watch():
    global peak
    while not done.wait(0.001):
        peak = max(peak, resident())

watcher = threading.Thread(target=watch)
watcher.start()
tree = checkpoint.load(config)
done.set()
watcher.join()
size = sum(leaf.nbytes for leaf in flat(tree).values())
print(size, (peak - before) / size)
"""


@pytest.mark.system
@pytest.mark.slow
def test_reading_needs_little_more_memory_than_the_result(tmp_path):
    def run(*args: str) -> str:
        command = [sys.executable, "-c", LOADING, *args, str(tmp_path / "step")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("export", "full", "float32")
    for trainable, dtype in (("full", "float32"), ("expert", "bfloat16")):
        size, ratio = map(float, run("load", trainable, dtype).split())
        assert size > 2e8
        assert ratio < 1.15

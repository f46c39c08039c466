"""Checkpoints of openpi: both layouts, PaliGemma's weights, what does not fit, memory, and the export."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pi0_agents
import pytest
from agent_tools import critic
from errors import naming
from pi0_agents import CONFIG, SMALL, SPEC, shown, split, started

from serl_chunk.agents.acfql import Acfql
from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.config.agents.pi0 import PI0_PRESETS, Pi0Config
from serl_chunk.models.pi0.pi0 import Pi0
from serl_chunk.models.pi0.tree import flat, folded, initial, leaves, nested, without_lora
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
    export(folder, config, *split(config, whole), STATS)
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
    export(tmp_path / "export", config, *split(config, whole), STATS)
    command = [os.environ["SERL_CHUNK_OPENPI"], "-c", RESTORED, str(tmp_path / "export" / "params"), dtype]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    ours = {path: np.asarray(leaf).astype(jnp.dtype(dtype)) for path, leaf in flat(whole).items()}
    assert found == {path: [list(a.shape), hashlib.sha256(a.tobytes()).hexdigest()] for path, a in ours.items()}


SAMPLED = """
import json, sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
sys.path.append(sys.argv[1])
from record_openpi import import_openpi, resize
jax.config.update("jax_default_matmul_precision", "highest")
folder, meta = Path(sys.argv[2]), json.loads(sys.argv[3])
openpi = import_openpi(folder)
resize(openpi, meta)
params = openpi.model.restore_params(folder / "export" / "params", restore_type=np.ndarray, dtype=jnp.float32)
model = openpi.pi0_config.Pi0Config(**meta["config"]).load(params)
given = {name: jnp.asarray(array) for name, array in np.load(folder / "given.npz").items()}
images = {name: given[name] for name in given if name.endswith("_rgb")}
observation = openpi.model.Observation(
    images, {name: jnp.ones(len(x), bool) for name, x in images.items()}, given["state"], given["prompt"],
    given["prompt_mask"])
np.save(folder / "sampled.npy", model.sample_actions(jax.random.key(0), observation, num_steps=4, noise=given["noise"]))
"""


def distilled(model: Pi0Config) -> tuple[Any, dict[str, np.ndarray]]:
    """A pi0 after updates that imitate its critic's choice, and observations as both models read them."""
    common = {name: getattr(CONFIG, name) for name in ("policy", "image_keys", "encoder", "language", "policy_ema")}
    own = {"critic": critic(), "candidates": 4, "policy_updates": 1, "improve_by": "distil", "lr": 3e-3}
    agent = Acfql(AcfqlConfig(pi0=model, **own, **common), SPEC)
    base, state, batch = agent.new_base(jax.random.key(0)), started(agent), shown(agent)
    for number in range(5):
        chunks, _ = agent.relabel(state, base, batch, jax.random.key(number))
        given = batch._replace(actions=batch.actions.at[:, : chunks.shape[1]].set(chunks))
        state, metrics = agent.update_policy(state, base, jax.tree.map(lambda x: x[None], given))
        assert metrics["actor/bc_loss"] > 0
    seen = {name: np.asarray(value) for name, value in batch.observations.items()}
    images = {camera: seen[f"images/{name}"] for camera, name in zip(model.cameras, CONFIG.image_keys, strict=False)}
    seen = {name: seen[name] for name in ("prompt", "prompt_mask")} | {
        "state": np.pad(seen["state"], [(0, 0), (0, model.action_dim - SPEC.state_dim)]),
        **{camera: (image / 127.5 - 1).astype(np.float32) for camera, image in images.items()},
    }
    noise = np.random.default_rng(1).normal(size=(len(seen["state"]), SPEC.horizon, model.action_dim))
    return nested(flat(base["pi0"]) | flat(state.policy["pi0"])), seen | {"noise": noise.astype(np.float32)}


@pytest.mark.slow
@pytest.mark.skipif("SERL_CHUNK_OPENPI" not in os.environ, reason="SERL_CHUNK_OPENPI names no Python with openpi")
@pytest.mark.parametrize(("trainable", "ranks"), [("expert", {}), ("lora", pi0_agents.lora())])
@jax.numpy_dtype_promotion("standard")
@jax.numpy_rank_promotion("allow")
def test_openpi_samples_what_we_sample(tmp_path, trainable, ranks):
    """Of what was distilled; LoRA is folded into the weights, as by `--merge_lora`."""
    model = dataclasses.replace(SMALL, trainable=trainable, **ranks)
    whole, given = distilled(model)
    np.savez(tmp_path / "given.npz", **given)
    exported, written = (without_lora(model), folded(model, whole)[0]) if ranks else (model, whole)
    export(tmp_path / "export", exported, written, {})
    gemma = {"depth": model.depth, "num_heads": model.heads, "num_kv_heads": model.kv_heads, "head_dim": model.head_dim}
    tower = dataclasses.asdict(model.siglip)
    meta = {
        "config": {
            "action_dim": model.action_dim, "action_horizon": SPEC.horizon, "max_token_len": given["prompt"].shape[1],
            "dtype": "float32", "paligemma_variant": "vlm", "action_expert_variant": "expert",
        },
        "gemma": {name: gemma | {"width": of.width, "mlp_dim": of.mlp}
                  for name, of in (("vlm", model.vlm), ("expert", model.expert))},
        "siglip": tower | {"mlp_dim": tower.pop("mlp"), "num_heads": tower.pop("heads")},
        "vocab": model.vocabulary, "image": model.image_size,
    }  # fmt: skip
    benchmarks = Path(__file__).parents[2] / "benchmarks"
    command = [os.environ["SERL_CHUNK_OPENPI"], "-c", SAMPLED, str(benchmarks), str(tmp_path), json.dumps(meta)]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "JAX"))}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=600)
    assert done.returncode == 0, done.stderr
    images = {f"images/{name}": given[name] for name in given if name.endswith("_rgb")}
    seen = images | {name: given[name] for name in ("state", "prompt", "prompt_mask")}

    @jax.jit
    def sample(params, noise):
        return Pi0(model).sample(params, Pi0(model).encode(params, seen), noise[:, None], None, 4)[:, 0]

    ours = np.asarray(sample(whole, given["noise"]))
    apart = np.abs(np.load(tmp_path / "sampled.npy") - ours).max()
    print(f"{trainable}: {apart:.1e} of numbers up to {np.abs(ours).max():.2f}")
    assert apart <= 2e-5


def test_parameters_of_another_model_are_not_exported(params, tmp_path):
    tree = nested(params)
    with pytest.raises(DataError, match=naming("PaliGemma/llm/final_norm_1/Dense_0/bias", "missing")):
        export(tmp_path / "export", dataclasses.replace(TINY, pi05=True), tree, {})
    assert not (tmp_path / "export").exists()

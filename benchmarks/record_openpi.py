"""Records outputs of openpi's own pi0 for cases of parity_pi0.py, of which `meta.json` and `inputs.npz` exist.

Runs in openpi's environment and imports nothing of the package. Sizes are the case's: openpi's variants, image tower,
vocabulary and resolution are replaced while it runs, its equations are not. Parameters follow the rule of
`support/pi0_rule.py`. Modules of PyTorch that are not installed are left empty: openpi imports them for its other
implementation.

    python benchmarks/record_pi0.py --out DIR --cases pi05,lora
    /path/to/openpi's/python benchmarks/record_openpi.py --openpi CHECKOUT DIR/pi05 DIR/lora
    python benchmarks/parity_pi0.py DIR
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
from support.pi0_rule import rule_leaf

STEPS = (4, 10)  # of the recorded samples
# Gradients that are kept number by number; of the others the norm.
GRADIENTS = ("action_in_proj/kernel", "action_out_proj/kernel", "PaliGemma/img/head/bias")


def import_openpi(checkout: Path) -> types.SimpleNamespace:
    sys.path[:0] = [str(checkout / "src"), str(checkout / "packages" / "openpi-client" / "src")]
    try:
        importlib.import_module("torch")
    except ImportError:
        nothing = type("Nothing", (), {})
        for name in ("torch.nn.functional", "torch.nn", "torch", "safetensors.torch", "safetensors"):
            module: Any = types.ModuleType(name)
            module.Tensor = module.dtype = module.uint8 = module.float32 = nothing
            sys.modules[name] = module
        pytorch: Any = types.ModuleType("openpi.models_pytorch.pi0_pytorch")
        pytorch.PI0Pytorch = nothing
        sys.modules |= {"openpi.models_pytorch": types.ModuleType("openpi.models_pytorch"), pytorch.__name__: pytorch}
        sys.modules["openpi.models_pytorch"].pi0_pytorch = pytorch  # type: ignore[attr-defined]
        sys.modules["torch.nn"].functional = sys.modules["torch.nn.functional"]  # type: ignore[attr-defined]
        sys.modules["torch"].nn = sys.modules["torch.nn"]  # type: ignore[attr-defined]
        sys.modules["safetensors"].torch = sys.modules["safetensors.torch"]  # type: ignore[attr-defined]
    names = ("model", "gemma", "siglip", "lora", "pi0", "pi0_config")
    return types.SimpleNamespace(**{name: importlib.import_module(f"openpi.models.{name}") for name in names})


def resize(openpi: types.SimpleNamespace, meta: dict[str, Any]) -> None:
    """Give openpi's model the sizes of a case."""

    def variant(name: str) -> Any:
        sizes = dict(meta["gemma"][name])
        lora = {part: openpi.lora.LoRAConfig(**of) for part, of in sizes.pop("lora", {}).items()}
        return openpi.gemma.Config(**sizes, lora_configs=lora)

    tower = dict(meta["siglip"])
    tower["patch_size"] = (tower.pop("patch"),) * 2
    openpi.gemma.PALIGEMMA_VOCAB_SIZE = meta["vocab"]
    openpi.gemma.get_config = variant
    openpi.siglip.decode_variant = lambda name: dict(tower)
    openpi.model.IMAGE_RESOLUTION = tuple(meta["image"])
    openpi.model.preprocess_observation = lambda rng, observation, **options: observation  # images have their size


def outputs_of(openpi: types.SimpleNamespace, meta: dict[str, Any], given: dict[str, np.ndarray]) -> dict[str, Any]:
    resize(openpi, meta)
    graph, state = nnx.split(openpi.pi0_config.Pi0Config(**meta["config"]).create(jax.random.key(0)))
    leaves = dict(state.flat_state())
    for path, leaf in leaves.items():
        leaves[path] = leaf.replace(jnp.asarray(rule_leaf("/".join(map(str, path)), leaf.value.shape)))
    state = nnx.State.from_flat_path(leaves)

    def named(group: str) -> dict[str, jax.Array]:
        return {k.removeprefix(group): jnp.asarray(v) for k, v in given.items() if k.startswith(group)}

    observation = openpi.model.Observation(
        named("obs/image/"), named("obs/image_mask/"), jnp.asarray(given["obs/state"]),
        jnp.asarray(given["obs/tokenized_prompt"]), jnp.asarray(given["obs/tokenized_prompt_mask"]),
    )  # fmt: skip
    actions, noise, time = (jnp.asarray(given[name]) for name in ("actions", "noise", "time"))

    def forward(state: Any) -> dict[str, Any]:
        """Compute the loss as `compute_loss` does, with the given draws, and keep what it goes through."""
        model = nnx.merge(graph, state)
        t = time[:, None, None]
        x, velocity = t * noise + (1 - t) * actions, noise - actions
        prefix, real, groups = model.embed_prefix(observation)
        suffix, suffix_real, suffix_groups, cond = model.embed_suffix(observation, x, time)
        valid = jnp.concatenate([real, suffix_real], axis=1)
        mask = openpi.pi0.make_attn_mask(valid, jnp.concatenate([groups, suffix_groups]))
        positions = jnp.cumsum(valid, axis=1) - 1
        (before, after), _ = model.PaliGemma.llm(
            [prefix, suffix], mask=mask, positions=positions, adarms_cond=[None, cond]
        )
        found = model.action_out_proj(after[:, -model.action_horizon :])
        _, cache = model.PaliGemma.llm(
            [prefix, None], mask=openpi.pi0.make_attn_mask(real, groups), positions=jnp.cumsum(real, axis=1) - 1
        )
        features = openpi.pi0.posemb_sincos(time, model.action_in_proj.out_features, min_period=4e-3, max_period=4.0)
        out = {
            "prefix_tokens": prefix, "prefix_mask": real, "prefix_ar": groups, "suffix_tokens": suffix,
            "suffix_mask": suffix_real, "suffix_ar": suffix_groups, "attn_mask": mask, "positions": positions,
            "prefix_out": before, "suffix_out": after, "v_t": found, "posemb": features, "kv_cache/k": cache[0],
            "kv_cache/v": cache[1], "loss": jnp.mean(jnp.square(found - velocity), axis=-1),
        }  # fmt: skip
        out |= {} if cond is None else {"adarms_cond": cond}
        for number, (camera, image) in enumerate(observation.images.items()):
            out[f"siglip/{camera}"], stages = model.PaliGemma.img(image, train=False)
            if number == 0:
                out |= {f"siglip/{name}": stages[name] for name in ("stem", "with_posemb", "encoded")}
        return out

    out = jax.jit(forward)(state)
    for path, leaf in jax.jit(jax.grad(lambda state: jnp.mean(forward(state)["loss"])))(state).flat_state().items():
        name, gradient = "/".join(map(str, path)), leaf.value.astype(jnp.float32)
        out[f"grad_norm/{name}"] = jnp.linalg.norm(gradient.ravel())
        out |= {f"grad/{name}": gradient} if name in GRADIENTS else {}
    for steps in STEPS:

        def sampled(state: Any, steps: int = steps) -> jax.Array:
            drawn = jnp.asarray(given["sample_noise"])
            return nnx.merge(graph, state).sample_actions(jax.random.key(0), observation, num_steps=steps, noise=drawn)

        out[f"sample_actions/{steps}"] = jax.jit(sampled)(state)
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--openpi", type=Path, required=True, metavar="CHECKOUT", help="of openpi's repository")
    parser.add_argument("cases", type=Path, nargs="+", metavar="CASE", help="a folder with meta.json and inputs.npz")
    args = parser.parse_args()
    jax.config.update("jax_default_matmul_precision", "highest")
    openpi = import_openpi(args.openpi)
    for folder in args.cases:
        with np.load(folder / "inputs.npz") as archive:
            given = {name: archive[name] for name in archive.files}
        out = outputs_of(openpi, json.loads((folder / "meta.json").read_text()), given)
        kept = {name: np.asarray(v.astype(jnp.float32) if v.dtype == jnp.bfloat16 else v) for name, v in out.items()}
        np.savez_compressed(folder / "outputs.npz", **kept)
        print(f"{folder}: {len(kept)} arrays", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

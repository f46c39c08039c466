"""Records cases of pi0 for parity_pi0.py, with parameters by the rule and the plain implementation.

It stands in for openpi where that is not installed: other sizes than those of the recorded case of openpi, pi0.5, LoRA,
several key heads, bfloat16, the released image tower. What it writes shows that two implementations agree, no more.

    python benchmarks/record_pi0.py --out DIR [--cases pi0,pi05]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from support.pi0_case import Arrays, config_of, rule_params
from support.reference_agents.pi0 import PlainPi0

from serl_chunk.config.agents.pi0 import Pi0Config
from serl_chunk.types import DataError

ROWS = 2
CAMERAS = Pi0Config().cameras
CHANGES: dict[str, dict[str, Any]] = {  # name -> what differs from the first
    "pi0": {},
    "pi05": {"config": {"pi05": True, "max_token_len": 20}},
    "lora": {
        "vlm": {"lora": {"attn": {"rank": 3, "alpha": 6.0}, "ffn": {"rank": 2, "alpha": 4.0}}},
        "expert": {"lora": {"attn": {"rank": 4, "alpha": 8.0}, "ffn": {"rank": 5, "alpha": 10.0}}},
    },
    "lora_pi05": {"config": {"pi05": True}, "vlm": {"lora": {"attn": {"rank": 2, "alpha": 3.0}}}},
    "widths": {
        "image": [42, 31],
        "siglip": {"width": 24, "depth": 2, "mlp_dim": 40, "num_heads": 3, "patch": 7},
        "vlm": {"width": 40, "mlp_dim": 56},
        "expert": {"width": 20, "mlp_dim": 36},
        "config": {"action_dim": 11, "action_horizon": 6},
    },
    "key_heads": {"both": {"num_heads": 6, "num_kv_heads": 2, "head_dim": 8}},
    "all_heads": {"both": {"num_heads": 4, "num_kv_heads": 4, "head_dim": 8}},
    "bfloat16": {"config": {"dtype": "bfloat16"}},
    "bfloat16_pi05": {"config": {"dtype": "bfloat16", "pi05": True}},
    "released_siglip": {
        "siglip": {"width": 1152, "depth": 27, "mlp_dim": 4304, "num_heads": 16, "patch": 14},
        "image": [56, 56],
    },
}
# Gradients that openpi's case holds number by number. In bfloat16 the others are no better than the bar: rounding alone
# moves them by up to 5e-2 of their largest number.
OF_OPENPI = ("action_in_proj/kernel", "action_out_proj/kernel", "PaliGemma/img/head/bias")
LARGE = ("released_siglip",)  # minutes, and gigabytes of memory


def meta_of(name: str) -> dict[str, Any]:
    """Return the sizes of a case, in the form of openpi's recorded ones."""
    change = CHANGES[name]
    config = {"action_dim": 32, "action_horizon": 5, "max_token_len": 12, "dtype": "float32", "pi05": False}
    variants = {"paligemma_variant": "vlm", "action_expert_variant": "expert"}
    shared = {"depth": 3, "num_heads": 4, "num_kv_heads": 1, "head_dim": 16, "lora": {}} | change.get("both", {})
    widths = {"vlm": {"width": 48, "mlp_dim": 96}, "expert": {"width": 32, "mlp_dim": 64}}
    siglip = {"width": 32, "depth": 2, "mlp_dim": 64, "num_heads": 2, "patch": 14}
    return {
        "case": name,
        "config": config | variants | change.get("config", {}),
        "image": change.get("image", [28, 42]),
        "vocab": 64,
        "siglip": siglip | change.get("siglip", {}),
        "gemma": {who: shared | sizes | change.get(who, {}) for who, sizes in widths.items()},
    }


def inputs_of(meta: Mapping[str, Any], seed: int = 0) -> Arrays:
    """Return a random observation and random draws, with a missing camera and padded prompts."""
    rng, given = np.random.default_rng(seed), meta["config"]
    length = given["max_token_len"]
    actions, noise, sample_noise = rng.standard_normal(
        (3, ROWS, given["action_horizon"], given["action_dim"]), np.float32
    )
    t = rng.uniform(0.05, 1.0, ROWS).astype(np.float32)
    shape = (ROWS, *meta["image"], 3)
    images = {f"obs/image/{camera}": rng.uniform(-1, 1, shape).astype(np.float32) for camera in CAMERAS}
    masks = {f"obs/image_mask/{camera}": np.array([True, camera != CAMERAS[-1]]) for camera in CAMERAS}
    return {
        **images,
        **masks,
        "obs/state": rng.standard_normal((ROWS, given["action_dim"]), np.float32),
        "obs/tokenized_prompt": rng.integers(0, meta["vocab"], (ROWS, length), dtype=np.int32),
        "obs/tokenized_prompt_mask": np.arange(length)[None] < np.array([[length - 4], [5]]),
        "actions": actions, "noise": noise, "time": t, "sample_noise": sample_noise,
        "x_t": t[:, None, None] * noise + (1 - t[:, None, None]) * actions, "u_t": noise - actions,
    }  # fmt: skip


def outputs_of(meta: Mapping[str, Any], params: Arrays, inputs: Arrays) -> Arrays:
    """Return what the plain implementation computes, under the recorded names."""

    def named(group: str) -> dict[str, jax.Array]:
        return {k.removeprefix(group): jnp.asarray(v) for k, v in inputs.items() if k.startswith(group)}

    observation: dict[str, Any] = {k: v for k, v in named("obs/").items() if "/" not in k}
    observation |= {"image": named("obs/image/"), "image_mask": named("obs/image_mask/")}
    x, t, actions, noise = (jnp.asarray(inputs[k]) for k in ("x_t", "time", "actions", "noise"))

    def forward(params: Any) -> dict[str, jax.Array]:
        plain = PlainPi0(meta, params)
        stages = {camera: plain.siglip(image) for camera, image in observation["image"].items()}
        out = plain.joint(observation, x, t) | {f"siglip/{camera}": stages[camera]["tokens"] for camera in CAMERAS}
        out |= {f"siglip/{stage}": stages[CAMERAS[0]][stage] for stage in ("stem", "with_posemb", "encoded")}
        out |= dict(zip(("kv_cache/k", "kv_cache/v"), plain.cache(observation), strict=True))
        return out | {f"sample_actions/{n}": plain.sample(observation, inputs["sample_noise"], n) for n in (2, 3)}

    def loss(params: Any) -> tuple[jax.Array, jax.Array]:
        each = PlainPi0(meta, params).loss(observation, actions, noise, t)
        return jnp.mean(each), each

    gradients, each = jax.jit(jax.grad(loss, has_aux=True))(params)
    out = {k: np.asarray(v) for k, v in jax.jit(forward)(params).items()} | {"loss": np.asarray(each)}
    out = {k: v.astype(np.float32) if v.dtype.kind == "V" else v for k, v in out.items()}
    for path, gradient in gradients.items():
        out[f"grad_norm/{path}"] = np.asarray(jnp.linalg.norm(gradient.ravel()))
        if gradient.size < 4096 and (path in OF_OPENPI or meta["config"]["dtype"] == "float32"):
            out[f"grad/{path}"] = np.asarray(gradient)
    return out


def record(name: str, folder: Path) -> None:
    meta = meta_of(name)
    params = rule_params(config_of(meta, CAMERAS))
    inputs = inputs_of(meta)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
    listed = [f"{path} {array.shape} {array.dtype}\n" for path, array in sorted(params.items())]
    (folder / "params.txt").write_text("".join(listed))
    np.savez(folder / "inputs.npz", **inputs)
    np.savez(folder / "outputs.npz", **outputs_of(meta, {k: jnp.asarray(v) for k, v in params.items()}, inputs))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    small = ",".join(name for name in CHANGES if name not in LARGE)
    parser.add_argument("--cases", default=small, metavar="NAMES", help=f"of {', '.join(CHANGES)}; default: {small}")
    args = parser.parse_args()
    names = args.cases.split(",")
    if wrong := sorted(set(names) - set(CHANGES)):
        raise DataError(f"--cases: {wrong[0]!r} is none (valid: {', '.join(CHANGES)})")
    jax.config.update("jax_default_matmul_precision", "highest")
    for name in names:
        record(name, args.out / name)
        print(f"{args.out / name}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except DataError as error:
        sys.exit(str(error))

"""A recorded case of openpi's pi0: its sizes as our configuration, its parameters, and the arrays that were recorded.

A case is a folder with `meta.json` (all sizes), `inputs.npz` and `outputs.npz`; perhaps `params.txt` (path, shape and
dtype of each parameter) and checkpoints, which are found by their `_METADATA`. Without one, parameters follow a rule.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from serl_chunk.config.agents.pi0 import ExpertConfig, Pi0Config, SiglipConfig, TransformerConfig, VlmConfig
from serl_chunk.models.pi0.masks import IMAGE_MASK_PREFIX
from serl_chunk.models.pi0.tree import flat, leaves
from serl_chunk.runs.openpi_checkpoints import Checkpoint
from serl_chunk.types import IMAGE_PREFIX, PROMPT, PROMPT_MASK, STATE, DataError
from support.pi0_rule import rule_leaf

Arrays = dict[str, np.ndarray]

_SHARED = ("depth", "num_heads", "num_kv_heads", "head_dim")  # sizes that both experts must agree in
_LORA_PARTS = {"attn", "ffn"}


def rule_params(config: Pi0Config) -> Arrays:
    """Return all parameters of a case without a checkpoint, `path -> array`."""
    return {path: rule_leaf(path, leaf.shape) for path, leaf in leaves(config).items()}


def _lora(lora: Mapping[str, Any]) -> dict[str, Any]:
    """Return our fields for openpi's LoRA of one expert; each part is {"rank", "alpha"}, or that pair."""
    if unknown := set(lora) - _LORA_PARTS:
        raise DataError(f"meta.json: LoRA of {sorted(unknown)}; this compares {sorted(_LORA_PARTS)}")
    parts = {k: v if isinstance(v, Mapping) else dict(zip(("rank", "alpha"), v, strict=True)) for k, v in lora.items()}
    fields: dict[str, Any] = {}
    if "attn" in parts:
        rank, alpha = int(parts["attn"]["rank"]), float(parts["attn"].get("alpha", 1.0))
        # rsLoRA counts alpha / sqrt(rank) times.
        fields |= {"attention_rank": rank, "attention_alpha": alpha * (rank**0.5 if parts["attn"].get("rslora") else 1)}
    if "ffn" in parts:
        fields["mlp_rank"] = int(parts["ffn"]["rank"])
    return fields


def _expert(kind: type[TransformerConfig], sizes: Mapping[str, Any]) -> Any:
    return kind(width=sizes["width"], mlp=sizes["mlp_dim"], **_lora(sizes.get("lora") or {}))


def config_of(meta: Mapping[str, Any], cameras: tuple[str, ...]) -> Pi0Config:
    """Return the configuration of a case. Raises DataError where the experts disagree."""
    given, siglip = meta["config"], meta["siglip"]
    vlm, expert = (meta["gemma"][given[f"{who}_variant"]] for who in ("paligemma", "action_expert"))
    if any(vlm[name] != expert[name] for name in _SHARED):
        raise DataError(f"meta.json: the experts differ in one of {', '.join(_SHARED)}")
    return Pi0Config(
        pi05=bool(given.get("pi05", False)),
        cameras=cameras,
        image_size=tuple(meta["image"]),
        action_dim=given["action_dim"],
        vocabulary=meta["vocab"],
        depth=vlm["depth"],
        heads=vlm["num_heads"],
        kv_heads=vlm["num_kv_heads"],
        head_dim=vlm["head_dim"],
        siglip=SiglipConfig(
            width=siglip["width"],
            depth=siglip["depth"],
            mlp=siglip.get("mlp_dim") or 4 * siglip["width"],
            heads=siglip["num_heads"],
            patch=siglip["patch"],
        ),
        vlm=_expert(VlmConfig, vlm),
        expert=_expert(ExpertConfig, expert),
        feature_grid=1,
        dtype=given["dtype"],
    )


class Case:
    """A recorded case. Raises DataError where a file is missing or the model is none that we have."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.name = folder, folder.name
        for name in ("meta.json", "inputs.npz", "outputs.npz"):
            if not (folder / name).is_file():
                raise DataError(f"{folder / name}: no such file. A case has meta.json, inputs.npz and outputs.npz.")
        self.meta: dict[str, Any] = json.loads((folder / "meta.json").read_text())
        self.inputs, self.outputs = _arrays(folder / "inputs.npz"), _arrays(folder / "outputs.npz")
        images = [k.removeprefix("obs/image/") for k in self.inputs if k.startswith("obs/image/")]
        usual = [camera for camera in Pi0Config().cameras if camera in images]  # openpi's order, whatever the file's
        self.config = config_of(self.meta, (*usual, *(camera for camera in images if camera not in usual)))
        self.checkpoints = sorted(file.parent for file in folder.rglob("_METADATA") if file.parent.name == "params")

    @property
    def exact(self) -> bool:
        """Whether the case was computed in float32."""
        return self.config.dtype == "float32"

    def observation(self, images: Mapping[str, np.ndarray] | None = None) -> Arrays:
        """Return the observation under our names, with other images where given."""
        renamed = {"obs/image/": IMAGE_PREFIX, "obs/image_mask/": IMAGE_MASK_PREFIX}
        out = {STATE: self.inputs["obs/state"]}
        for ours, theirs in ((PROMPT, "obs/tokenized_prompt"), (PROMPT_MASK, "obs/tokenized_prompt_mask")):
            if theirs in self.inputs:
                out[ours] = self.inputs[theirs]
        for theirs, ours in renamed.items():
            found = {k.removeprefix(theirs): v for k, v in self.inputs.items() if k.startswith(theirs)}
            out |= {ours + camera: value for camera, value in found.items()}
        return out | {IMAGE_PREFIX + camera: image for camera, image in (images or {}).items()}

    def listed(self) -> dict[str, str]:
        """Return path -> "shape dtype" of `params.txt`; empty where there is none."""
        file = self.folder / "params.txt"
        lines = file.read_text().splitlines() if file.is_file() else []
        return dict(line.split(" ", 1) for line in lines if line.strip())

    def params(self) -> Arrays:
        """Return the parameters in the listed dtypes, `path -> array`: the first checkpoint's, or those of the rule."""
        listed = self.listed()
        if self.checkpoints:
            found: Arrays = flat(Checkpoint(self.checkpoints[0]).load(self.config))
        else:
            found = rule_params(self.config)
        dtypes = {path: text.rpartition(" ")[2] for path, text in listed.items()}
        return {path: array.astype(np.dtype(dtypes.get(path, array.dtype))) for path, array in found.items()}


def _arrays(file: Path) -> Arrays:
    with np.load(file, allow_pickle=False) as archive:
        found = {name: archive[name] for name in archive.files}
    return {k: v.view(ml_dtypes.bfloat16) if v.dtype.kind == "V" else v for k, v in found.items()}

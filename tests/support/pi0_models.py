"""Small pi0 models with parameters by the rule, their inputs, and the plain implementation."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
if str(BENCHMARKS) not in sys.path:
    sys.path.append(str(BENCHMARKS))

import parity_pi0  # noqa: E402
import pi0_best_of_n  # noqa: E402
import record_pi0  # noqa: E402
from record_pi0 import CAMERAS, inputs_of, meta_of  # noqa: E402
from support.pi0_case import Case, config_of, rule_params  # noqa: E402
from support.reference_agents.pi0 import PlainPi0  # noqa: E402

from serl_chunk.config.agents.pi0 import Pi0Config  # noqa: E402
from serl_chunk.models.pi0.pi0 import Pi0  # noqa: E402
from serl_chunk.models.pi0.tree import nested  # noqa: E402

__all__ = ["CAMERAS", "Case", "PlainPi0", "Small", "parity_pi0", "pi0_best_of_n", "record_pi0", "small"]


class Small(NamedTuple):
    """One of the cases of record_pi0.py, with fewer layers."""

    meta: Mapping[str, Any]
    config: Pi0Config
    model: Pi0
    flat: dict[str, jax.Array]  # path -> parameter
    params: Any  # the same as a tree
    inputs: dict[str, np.ndarray]
    observation: dict[str, np.ndarray]


def small(name: str, depth: int = 2) -> Small:
    meta = meta_of(name)
    for expert in meta["gemma"].values():
        expert["depth"] = depth
    config = config_of(meta, CAMERAS)
    flat = jax.device_put(rule_params(config))
    inputs = inputs_of(meta)
    return Small(meta, config, Pi0(config), flat, nested(flat), inputs, _observed(inputs))


def _observed(inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the recorded observation under our names."""
    renamed = {"obs/image/": "images/", "obs/image_mask/": "image_masks/", "obs/state": "state",
               "obs/tokenized_prompt_mask": "prompt_mask", "obs/tokenized_prompt": "prompt"}  # fmt: skip
    found = {}
    for name, array in inputs.items():
        for theirs, ours in renamed.items():
            if name.startswith(theirs):
                found[ours + name.removeprefix(theirs)] = array
                break
    return found

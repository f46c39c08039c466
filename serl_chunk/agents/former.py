"""States and parameters that versions up to 2514010 wrote, under the names of today."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from serl_chunk.agents.state import AgentState, Params
from serl_chunk.types import ConfigError

Flat = Mapping[str, np.ndarray]

_FROZEN = ".frozen"  # the backbone, when it was a part of the state
_AVERAGES = (".state.policy_average", ".state.grasp['policy_average']")  # were copies where nothing is averaged


class Learned(NamedTuple):
    """What a checkpoint has of an agent."""

    state: AgentState
    base: Params  # empty where it has a source


def current_leaves(leaves: Flat, template: Learned, base: Params) -> dict[str, np.ndarray]:
    """Return a checkpoint's leaves, `path -> array` as jax.tree_util.keystr names them, as those of `Learned`.

    Raises ConfigError where a backbone in them is not that of `base`, which was read from its source.
    """
    if ".rng" not in leaves:
        return dict(leaves)
    expected = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(template)}
    read = {f".base{jax.tree_util.keystr(path)}": leaf for path, leaf in jax.tree_util.tree_leaves_with_path(base)}
    out = {}
    for path, leaf in leaves.items():
        if path.startswith(_FROZEN):
            now = f".base['backbone']{path[len(_FROZEN) :]}"
            if base and not np.array_equal(read.get(now, np.zeros(0)), leaf):
                raise ConfigError(
                    "the file has other weights than the run's checkpoint. Give the file that the run began with",
                    parameter="agent.encoder.weights",
                )
            path = "" if base else now
        else:
            path = f".state{path}"
        if path and (path in expected or not path.startswith(_AVERAGES)):
            out[path] = leaf
    return out


def current_params(flat: Flat, *, has_source: bool) -> dict[str, Any]:
    """Return published parameters, `path -> array`, under the names of today."""
    out = {}
    for path, leaf in flat.items():
        if path == "candidates":  # how many were compared, 0 for all
            out["trusted"] = np.asarray(leaf == 0)
        elif path.startswith("frozen/"):
            if not has_source:
                out[f"base/backbone/{path[len('frozen/') :]}"] = leaf
        else:
            out[path] = leaf
    return out

"""HIL-SERL's pretrained ResNet-10, a pickle of nested dicts of arrays, as the weights of our resnet10 backbone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from serl_chunk.config.agents.encoder import resnet10_leaves
from serl_chunk.data.formats.restricted_pickle import kind_of, load_plain
from serl_chunk.io import atomic_path, os_faults
from serl_chunk.types import DataError


def read_resnet10(path: Path) -> tuple[dict[str, np.ndarray], list[str]]:
    """Read the weights in HIL-SERL's `resnet10_params.pkl` by path, float32; nothing in the file is run.

    Also returns the names in the file that no backbone has (a classifier's).

    Raises DataError: the file cannot be read or holds more than arrays, or a weight is missing or of another shape.
    """
    tree = load_plain(path)
    if not isinstance(tree, Mapping):
        raise DataError(f"{path}: holds {kind_of(tree)}, not the nested dict of arrays that HIL-SERL publishes")
    if isinstance(tree.get("params"), Mapping):
        tree = tree["params"]
    found = {_renamed(name): (name, value) for name, value in _leaves(tree)}
    weights = {}
    for name, shape in resnet10_leaves().items():
        if name not in found:
            raise DataError(f"{path}: lacks {_renamed(name, _THEIRS)!r}; is it HIL-SERL's resnet10_params.pkl?")
        theirs, value = found[name]
        if not isinstance(value, np.ndarray) or value.shape != shape or value.dtype.kind != "f":
            raise DataError(
                f"{path}: {theirs!r} is {kind_of(value)}, expected floats of shape {shape}; is it a ResNet-10?"
            )
        if not np.isfinite(value).all():
            raise DataError(f"{path}: {theirs!r} is not finite. Copy the file again")
        weights[name] = np.ascontiguousarray(value, np.float32)
    return weights, sorted(found[name][0] for name in set(found) - set(weights))


def write_weights(path: Path, weights: Mapping[str, np.ndarray]) -> None:
    """Write the file for `agent.encoder.weights`, whole or not at all. Raises DataError.

    An .npz archive whose bytes depend on the weights alone.
    """
    with os_faults(DataError, f"{path}: cannot write the file"), atomic_path(path) as part, part.open("wb") as file:
        np.savez(file, **weights)  # type: ignore[arg-type]  # its members have no time but the format's first


def _leaves(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and above.count("/") < _DEPTH:
            yield from _leaves(value, f"{above}{key}/")
        else:
            yield f"{above}{key}", value


_DEPTH = 8  # of dicts in one another, where a network has 3
_NAMES = {"ResNetBlock_": "block_", "Conv_": "conv_", "MyGroupNorm_": "norm_"}
_THEIRS = {ours: theirs for theirs, ours in _NAMES.items()}


def _renamed(name: str, names: Mapping[str, str] = _NAMES) -> str:
    return re.sub(rf"(?<![^/])({'|'.join(names)})(?=\d/)", lambda match: names[match[0]], name)

"""HIL-SERL's pretrained ResNet-10, a pickle of nested dicts of arrays, as the weights of our resnet10 backbone."""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from serl_chunk.config.encoders import resnet10_leaves
from serl_chunk.data.formats.restricted_pickle import load_plain
from serl_chunk.types import DataError


class Converted(NamedTuple):
    """The backbone's weights by path, float32, and the names in the file that no backbone has (a classifier's)."""

    weights: dict[str, np.ndarray]
    left_out: list[str]


def read_resnet10(path: Path) -> Converted:
    """The weights in HIL-SERL's `resnet10_params.pkl`; nothing in the file is run.

    Raises DataError: the file cannot be read or holds more than arrays, or a weight is missing or of another shape.
    """
    tree = load_plain(path)
    if not isinstance(tree, Mapping):
        raise DataError(f"{path}: holds a {type(tree).__name__}, not the nested dict of arrays that HIL-SERL publishes")
    if isinstance(tree.get("params"), Mapping):
        tree = tree["params"]
    found = {_renamed(name): (name, value) for name, value in _leaves(tree)}
    weights = {}
    for name, shape in resnet10_leaves().items():
        if name not in found:
            raise DataError(f"{path}: lacks {_theirs(name)!r}; is it HIL-SERL's resnet10_params.pkl?")
        theirs, value = found[name]
        if not isinstance(value, np.ndarray) or value.shape != shape or value.dtype.kind != "f":
            what = f"{value.dtype}{value.shape}" if isinstance(value, np.ndarray) else type(value).__name__
            raise DataError(f"{path}: {theirs!r} is {what}, floats of shape {shape} were expected; is it a ResNet-10?")
        if not np.isfinite(value).all():
            raise DataError(f"{path}: {theirs!r} holds numbers that are not finite; copy the file again")
        weights[name] = np.asarray(value, np.float32)
    return Converted(weights, sorted(found[name][0] for name in set(found) - set(weights)))


def write_weights(path: Path, weights: Mapping[str, np.ndarray]) -> None:
    """Write the file that `agent.encoder.weights` names, whole or not at all; raises DataError.

    An .npz archive whose bytes depend on the weights alone.
    """
    part = path.with_name(path.name + ".part")
    try:
        with zipfile.ZipFile(part, "w") as archive:
            for name, value in weights.items():
                # A member's time is the archive format's first: a file that is made twice is the same file.
                with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, np.ascontiguousarray(value), allow_pickle=False)
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise DataError(f"{path}: cannot write the file: {error}") from error


def _leaves(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{above}{key}/")
        else:
            yield f"{above}{key}", value


_NAMES = ((r"^ResNetBlock_(\d)/", r"block_\1/"), (r"/Conv_(\d)/", r"/conv_\1/"), (r"/MyGroupNorm_(\d)/", r"/norm_\1/"))
_BACK = ((r"^block_(\d)/", r"ResNetBlock_\1/"), (r"/conv_(\d)/", r"/Conv_\1/"), (r"/norm_(\d)/", r"/MyGroupNorm_\1/"))


def _renamed(name: str) -> str:
    for pattern, ours in _NAMES:
        name = re.sub(pattern, ours, name)
    return name


def _theirs(name: str) -> str:
    for pattern, theirs in _BACK:
        name = re.sub(pattern, theirs, name)
    return name

"""Parameters of a pi0 in one `.npz`, by their paths: what `serl-chunk pi0 import` writes and agents begin with."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Collection
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from serl_chunk.config.agents.pi0 import Pi0Config
from serl_chunk.io import os_reason
from serl_chunk.models.pi0.tree import LORA_A, LORA_B, leaves
from serl_chunk.types import ConfigError

_PARAMETER = "agent.pi0.weights"


class Writer:
    """Writes parameters into a file, one after the other. Raises OSError."""

    def __init__(self, file: Path | str) -> None:
        self._archive = zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True)

    def add(self, path: str, array: np.ndarray) -> None:
        with self._archive.open(f"{path}.npy", "w", force_zip64=True) as member:
            np.lib.format.write_array(member, np.ascontiguousarray(array), allow_pickle=False)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self._archive.close()


def read(
    file: Path | str, config: Pi0Config, paths: Collection[str],
    place: Callable[[np.ndarray], jax.Array] = jnp.array, *, missing_lora: bool = False,
) -> dict[str, jax.Array]:  # fmt: skip
    """Read the parameters `paths` of `config`, each in its dtype there, and `place` one after the other.

    `missing_lora`: LoRA that the file lacks is left out. Raises ConfigError, which names the first parameter that is
    missing or of another shape.
    """
    wanted, out = leaves(config), {}
    try:
        with np.load(file, allow_pickle=False) as stored:
            for path in paths:
                leaf = wanted[path]
                if path not in stored.files:
                    if missing_lora and path.endswith((LORA_A, LORA_B)):
                        continue
                    raise ConfigError(
                        f"{file} has no {path}: it holds another model. Make it with `serl-chunk pi0 import` from a "
                        "checkpoint of these sizes",
                        parameter=_PARAMETER,
                    )
                array = stored[path]
                if array.shape != leaf.shape:
                    raise ConfigError(
                        f"{file}: {path} has the shape {array.shape}, the settings of agent.pi0 give {leaf.shape}. "
                        "Set its sizes as the checkpoint's",
                        parameter=_PARAMETER,
                    )
                if array.dtype == np.dtype("V2"):  # numpy does not know its name
                    array = array.view(ml_dtypes.bfloat16)
                out[path] = place(array.astype(leaf.dtype, copy=False))
    except (OSError, ValueError, zipfile.BadZipFile, EOFError) as error:
        what = f"{file} cannot be read as parameters of pi0: {os_reason(error)}. Make it with `serl-chunk pi0 import`"
        raise ConfigError(what, parameter=_PARAMETER) from error
    return out

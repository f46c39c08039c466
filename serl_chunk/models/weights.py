"""Files of pretrained weights: .npz archives of float32 arrays, one for each parameter, named by its path."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from serl_chunk.types import ConfigError


def read_weights(path: str, leaves: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """The arrays of the file at `path`, float32, exactly those that `leaves` names and in these shapes.

    No pickle in the file is read. Raises ConfigError for a file that cannot be read, and for the first name that is
    missing, unknown, of another shape, not of floats or not finite.
    """
    where = f"agent.encoder.weights={path}"
    try:
        file = np.load(Path(path).expanduser(), allow_pickle=False)
        if not isinstance(file, np.lib.npyio.NpzFile):
            raise ValueError("it is a single array")
        with file:
            found = {name: file[name] for name in file.files}
    except FileNotFoundError:
        raise ConfigError(
            f"{where}: there is no such file here; the learner reads it (the actor does not need it): give its path "
            "there, or make one with `serl-chunk data encoder resnet10_params.pkl FILE.npz`"
        ) from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigError(
            f"{where}: not a .npz of plain arrays ({_why(error)}); `serl-chunk data encoder resnet10_params.pkl "
            "FILE.npz` makes one of HIL-SERL's weights, which are a pickle whatever the file is called"
        ) from error
    return checked(found, leaves, where)


def _why(error: Exception) -> str:
    """numpy's reason; where it advises to load the file unsafely, what it has found instead."""
    text = str(error)
    if "unsafely" in text:  # said of every file without the marks of an archive or an array
        return "it is no archive, but a pickle or something else"
    return "it holds objects" if "allow_pickle" in text else text


def checked(
    found: Mapping[str, np.ndarray], leaves: Mapping[str, tuple[int, ...]], where: str
) -> dict[str, np.ndarray]:
    """`found` as float32 in the order of `leaves`; raises ConfigError, which begins with `where`."""
    for name, shape in leaves.items():
        if name not in found:
            raise ConfigError(f"{where}: lacks {name!r} of shape {shape}; is it of another network?")
        array = found[name]
        if array.shape != shape or array.dtype.kind != "f":
            raise ConfigError(
                f"{where}: {name!r} is {array.dtype}{array.shape}, floats of shape {shape} were expected; is it of "
                "another network?"
            )
        if not np.isfinite(array).all():
            raise ConfigError(f"{where}: {name!r} holds numbers that are not finite; make or copy the file again")
    unknown = sorted(set(found) - set(leaves))
    if unknown:
        raise ConfigError(f"{where}: holds {unknown[0]!r}, which this network does not have; is it of another one?")
    return {name: np.asarray(found[name], np.float32) for name in leaves}

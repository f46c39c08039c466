"""A classifier's folder: `classifier.json` describes it, `weights.npz` has its parameters. Imports no JAX."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from serl_chunk.config.agents.encoder import EncoderConfig
from serl_chunk.data.encoder_weights import write_weights
from serl_chunk.io import atomic_write, folder_fault, os_faults, os_reason
from serl_chunk.types import CameraSpec, ConfigError, DataError

FORMAT = 1
DESCRIPTION, WEIGHTS = "classifier.json", "weights.npz"
_RETRAIN = "Train it with `serl-chunk classifier train`, or copy the whole folder again"


@dataclasses.dataclass(frozen=True)
class Description:
    """A classifier without its parameters."""

    cameras: tuple[CameraSpec, ...]  # whose frames it looks at, with their sizes, in the order of the network
    classes: tuple[str, ...]  # two or more; the last one is the success
    threshold: float  # probability of success from which a frame counts
    frames: int  # so many counting frames in a row are a success
    encoder: EncoderConfig
    positives: int = 0  # frames of success that it was trained on
    negatives: int = 0  # others
    validation: dict[str, Any] = dataclasses.field(default_factory=dict)  # on held-out episodes: `Evaluation.to_json`
    data: tuple[str, ...] = ()  # where the episodes came from, as shown to the user
    digest: str = ""  # sixteen hex digits of the bytes of `weights.npz`; empty before it is written

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Description:
        """Raises KeyError, TypeError, ValueError or ConfigError where `saved` is no description."""
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in saved.items() if k != "format"}
        encoder: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values["encoder"].items()}
        values |= {"encoder": EncoderConfig(**encoder), "cameras": tuple(CameraSpec(**c) for c in values["cameras"])}
        out = cls(**values)
        if len(out.classes) < 2 or not out.cameras or out.frames < 1 or not 0 < out.threshold < 1:
            raise ValueError("it needs two classes, a camera, frames of at least 1 and a threshold in (0, 1)")
        return out


def check_free(folder: Path) -> None:
    """Raise ConfigError for `out` unless a classifier can be written to `folder`, which is made where absent."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(folder_fault(folder, error), parameter="out") from error
    if (folder / DESCRIPTION).exists():
        raise ConfigError(f"{folder}: holds a classifier already. Choose another folder", parameter="out")


def save(folder: Path, description: Description, weights: Mapping[str, np.ndarray]) -> Description:
    """Write a classifier, its description last; returns the description with the digest. Raises DataError."""
    write_weights(folder / WEIGHTS, weights)
    with os_faults(DataError, f"{folder}: cannot write the classifier"):
        description = dataclasses.replace(description, digest=_digest((folder / WEIGHTS).read_bytes()))
        atomic_write(folder / DESCRIPTION, json.dumps(description.to_json(), indent=1) + "\n")
    return description


def read_description(folder: Path) -> Description:
    """Read `classifier.json`. Raises ConfigError: absent, of a newer format, or no description."""
    file = folder / DESCRIPTION
    try:
        saved = json.loads(file.read_text(), parse_constant=_not_a_number)
    except FileNotFoundError:
        raise ConfigError(f"{folder}: no classifier ({DESCRIPTION} is missing). {_RETRAIN}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read ({os_reason(error)}). {_RETRAIN}") from error
    number = saved.get("format") if isinstance(saved, dict) else None
    if not isinstance(number, int) or number > FORMAT:
        raise ConfigError(
            f"{file}: has format {number!r}, expected at most {FORMAT}. Use a later version of serl_chunk"
        )
    try:
        return Description.from_json(saved)
    except (KeyError, TypeError, ValueError, AttributeError, ConfigError) as error:
        raise ConfigError(f"{file}: does not describe a classifier ({error}). {_RETRAIN}") from error


def read_classifier(folder: Path) -> tuple[Description, dict[str, np.ndarray]]:
    """Read a classifier; no pickle in it is read.

    Returns the description, and the parameters by path. Raises ConfigError: a file is missing, damaged or of another
    classifier.
    """
    description = read_description(folder)
    file = folder / WEIGHTS
    try:
        found = _digest(file.read_bytes())
        if found != description.digest:
            raise ConfigError(
                f"{file}: has digest {found}, {DESCRIPTION} expects {description.digest}: a file is damaged or of "
                f"another classifier. {_RETRAIN}"
            )
        with np.load(file, allow_pickle=False) as archive:
            return description, {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{file}: cannot be read ({os_reason(error)}). {_RETRAIN}") from error


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _not_a_number(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")

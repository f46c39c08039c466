"""Small frames with a success that a network learns in seconds: a bright square."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from serl_chunk.classifier.dataset import CLASSES, Labelled, LabelledEpisode
from serl_chunk.classifier.files import Description, save
from serl_chunk.classifier.model import flat_arrays, initial, network
from serl_chunk.config.agents.encoder import EncoderConfig
from serl_chunk.types import CameraSpec

SIZE = 16
CAMERAS = ("top", "wrist")
TINY = EncoderConfig(features=(4,), latent=4)


def save_random(folder: Path, camera: CameraSpec, frames: int = 2, classes: tuple[str, ...] = CLASSES) -> Path:
    """Write a classifier of one camera with random weights; returns its folder."""
    net = network((camera,), TINY, len(classes))
    folder.mkdir(exist_ok=True)
    description = Description((camera,), classes, 0.5, frames, TINY)
    save(folder, description, flat_arrays(initial(net, (camera,), 0)))
    return folder


def frame(rng: np.random.Generator, shown: bool) -> np.ndarray:
    """uint8[16, 16, 3]: dark noise, with a square of success where `shown`."""
    image = rng.integers(0, 60, (SIZE, SIZE, 3), np.uint8)
    if shown:
        at = rng.integers(3, 8)
        image[at : at + 6, at : at + 6, 0] = 220
    return image


def episode(number: int, success: bool, frames: int = 12, shown: int = 4, label: int = 1) -> LabelledEpisode:
    """An episode whose last `shown` frames show the success, if it is one."""
    rng = np.random.default_rng(number)
    labels = np.zeros(frames, np.int8)
    labels[frames - shown :] = label if success else 0
    images = {c: np.stack([frame(rng, bool(label)) for label in labels]) for c in CAMERAS}
    return LabelledEpisode(f"toy: {number}", images, labels, np.arange(frames, dtype=np.int32))


def toy(episodes: int, first: int = 0) -> Labelled:
    """Successes and failures in turn."""
    return Labelled([episode(first + i, i % 2 == 0) for i in range(episodes)], CLASSES, [])

"""A trained success classifier in the control loop: several frames in a row above its threshold are a success."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from serl_chunk.classifier.files import read_classifier
from serl_chunk.config.fields import require
from serl_chunk.types import IMAGE_PREFIX, ConfigError, Observation, RobotSpec

SETTING = "outcome.classifier"
CLASS_PROBABILITY = "class_probability"  # in the info of a robot whose state has classes: float64[N]


class Classifier:
    """Looks at one observation after the other.

    It is compiled where it is built; a look then takes as long as the network, about a millisecond for the small one.

    `folder`: of `serl-chunk classifier train`. `compiled`: False: the first look compiles it, for a check of its files.
    Raises ConfigError where the folder holds no classifier, or a damaged one.
    """

    def __init__(self, folder: str | Path, *, compiled: bool = True) -> None:
        from serl_chunk.classifier.model import Predictor  # imports JAX

        self._folder = Path(folder).expanduser()
        try:
            self.description, weights = read_classifier(self._folder)
            predictor = Predictor(self.description, weights, str(self._folder))
        except ConfigError as error:
            raise ConfigError(str(error), parameter=SETTING) from error
        if compiled:
            predictor.warm()
        self._predict: Callable[[Mapping[str, Any]], np.ndarray] = predictor
        self.cameras = tuple(c.name for c in self.description.cameras)
        self.reset()

    def reset(self) -> None:
        """Begin an episode: no frame counts yet."""
        classes = len(self.description.classes)
        self._in_a_row = np.zeros(classes, int)  # newest frames that show a class ...
        self._holding = np.zeros(classes, int)  # ... while the condition holds

    def numbers(self, names: Iterable[str], parameter: str) -> list[int]:
        """Return the numbers of classes. Raises ConfigError, which names `parameter`, for one that it lacks."""
        classes, names = self.description.classes, list(names)
        for name in names:
            require(
                name in classes, parameter, f"{self._folder}: has no class {name!r}. Its classes: {', '.join(classes)}"
            )
        return [classes.index(name) for name in names]

    def check(self, spec: RobotSpec) -> None:
        """Raise ConfigError unless the robot has the classifier's cameras in their sizes."""
        has = {c.name: c for c in spec.cameras}
        for camera in self.description.cameras:
            other = has.get(camera.name)
            found = "none" if other is None else f"{other.height}x{other.width}"
            names = ", ".join(f"{c.name} {c.height}x{c.width}" for c in spec.cameras) or "none"
            require(other == camera, SETTING,
                f"{self._folder}: looks at camera {camera.name!r} of {camera.height}x{camera.width} pixels (got "
                f"{found}; robot {spec.name} has: {names}). Train it on frames of this robot")  # fmt: skip

    def probability(self, observation: Observation) -> np.ndarray:
        """Return float64[N], the probability of each class. Raises ConfigError for frames of other sizes."""
        images = {}
        for camera in self.description.cameras:
            image = observation.get(IMAGE_PREFIX + camera.name)
            if image is None or image.shape != (camera.height, camera.width, 3) or image.dtype != np.uint8:
                found = "none" if image is None else f"{image.dtype}{[*image.shape]}"
                raise ConfigError(
                    f"{self._folder}: got {found} of camera {camera.name!r}, expected "
                    f"uint8{[camera.height, camera.width, 3]}. Train it on frames of this robot",
                    parameter=SETTING,
                )
            images[camera.name] = image[None]
        return self._predict(images)[0]

    def seconds(self, looks: int = 20) -> float:
        """Measure a look: the median of so many."""
        black = {IMAGE_PREFIX + c.name: np.zeros((c.height, c.width, 3), np.uint8) for c in self.description.cameras}
        took = []
        for _ in range(looks):
            begin = time.perf_counter()
            self.probability(black)
            took.append(time.perf_counter() - begin)
        return statistics.median(took)

    def count(self, probability: np.ndarray, holds: bool) -> None:
        """Take in the next frame: float64[N], and whether the condition on the state holds."""
        thresholds = np.full(len(probability), max(0.5, self.description.threshold))
        thresholds[-1] = self.description.threshold
        counts = probability >= thresholds
        self._in_a_row = np.where(counts, self._in_a_row + 1, 0)
        self._holding = np.where(counts & holds, self._holding + 1, 0)

    def seen(self, number: int, *, holding: bool = False) -> bool:
        """Return whether the newest frames show a class, so many in a row; `holding`: under the condition, too."""
        return bool((self._holding if holding else self._in_a_row)[number] >= self.description.frames)

"""A stand-in of OpenCV's `cv2`: a camera that takes settings and gives one picture a read, in any process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

CAP_V4L2, COLOR_BGR2RGB = "V4L2", "BGR2RGB"


def __getattr__(name: str) -> str:
    if not name.startswith("CAP_PROP_"):
        raise AttributeError(name)
    return name.replace("CAP_PROP_", "")


def VideoWriter_fourcc(*letters: str) -> int:
    return int.from_bytes("".join(letters).encode(), "little")


def cvtColor(image: np.ndarray, code: str, into: np.ndarray) -> None:
    np.copyto(into, image[:, :, ::-1])


class VideoCapture:
    """Its class attributes are what a test sets. Without an `image`, pixels are the last digit of the device's path."""

    image: np.ndarray | None = np.zeros((0, 0, 3), np.uint8)  # None: no picture comes
    clock: Callable[[], float] = staticmethod(time.monotonic)
    delay = 0.0  # s between the stamp and the read
    refuses: frozenset[str] = frozenset()  # settings
    fixed: ClassVar[dict[str, float]] = {}  # settings that it has, whatever is set
    opened: ClassVar[list[VideoCapture]] = []

    def __init__(self, path: str, backend: str) -> None:
        assert backend == CAP_V4L2
        self.path, self.values, self.released = path, dict[str, Any](), False
        self.opened.append(self)

    def isOpened(self) -> bool:
        return True

    def set(self, name: str, value: float) -> bool:
        if name not in self.refuses:
            self.values[name] = value
        return name not in self.refuses

    def get(self, name: str) -> float:
        return {**self.values, "POS_MSEC": 1e3 * (self.clock() - self.delay), **self.fixed}[name]

    def read(self) -> tuple[bool, np.ndarray | None]:
        if self.image is None or self.image.size:
            return self.image is not None, self.image
        time.sleep(0.02)
        size = self.values["FRAME_HEIGHT"], self.values["FRAME_WIDTH"], 3
        return os.path.exists(self.path), np.full(size, int(self.path[-1]), np.uint8)

    def release(self) -> None:
        self.released = True

"""A camera without a sensor: a bar that moves over a gradient."""

from __future__ import annotations

import time
from typing import Callable

import numpy as np

from serl_chunk_robot.drivers.camera import READ_WITHIN, CameraError, CameraSpec, Frame

BAR = 8  # pixels of the width of the bar, which moves by one in each picture


class FakeCamera:
    """A test picture, `rate` times a second. No two consecutive ones are equal.

    It reads as a real one does: a picture waits for its moment, and a reader that comes late misses those in between.
    Set `frozen` to repeat the last picture with new stamps and numbers, and `stopped` to give none any more.

    Args:
        height, width: of the picture, pixels.
        rate: pictures a second.
    """

    def __init__(self, height: int = 480, width: int = 640, rate: float = 30.0) -> None:
        if height < 1 or width <= BAR or not rate > 0:
            raise ValueError(f"a picture has 1 row, {BAR + 1} columns and a rate above 0 at least")
        self._spec, self._period = CameraSpec(height, width), 1.0 / rate
        self.frozen = self.stopped = False

    def spec(self) -> CameraSpec:
        return self._spec

    def open(self, clock: Callable[[], float]) -> None:
        height, width, _ = self._spec
        self._image = np.zeros((height, width, 3), np.uint8)
        self._background = np.zeros((height, width, 3), np.uint8)
        self._background[:, :, 0] = np.arange(height)[:, None] * 255 // height
        self._background[:, :, 2] = np.arange(width)[None] * 255 // width
        self._clock, self._began, self._number = clock, clock(), 0

    def read(self) -> Frame:
        if self.stopped:
            time.sleep(READ_WITHIN)
            raise CameraError(f"no picture within {READ_WITHIN:g} s")
        due = self._began + (self._number + 1) * self._period
        now = self._clock()
        if due > now:
            time.sleep(due - now)
        self._number = max(self._number + 1, int((now - self._began) / self._period))  # a late reader misses some
        if not self.frozen:
            self._draw(self._number)
        return Frame(self._image, self._clock(), self._number)

    def close(self) -> None:
        """Nothing is open."""

    def _draw(self, number: int) -> None:
        at = number % (self._spec.width - BAR)
        np.copyto(self._image, self._background)
        self._image[:, at : at + BAR, 1] = 255

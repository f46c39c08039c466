"""Cameras of simulated tasks behind a robot server: they draw the state that it publishes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from serl_chunk_robot.client.client import Keys, RobotClient
from serl_chunk_robot.drivers.camera import READ_WITHIN, CameraError, CameraSpec, Frame


class DrawnCamera:
    """Draws square pictures of a served robot, in a process of its own. A subclass implements `_draw`.

    Args:
        size: of the picture, pixels.
        rate: pictures a second.
        server: HOST[:PORT] of the robot server.
        keys: file of a key that the server admits, as `serl-chunk keys join` writes it; empty: it has no keys.
        extra: what the state's `extra` must have.

    Raises:
        ValueError: a size or a rate that gives no picture.
    """

    def __init__(self, size: int, rate: float, server: str, keys: str, extra: frozenset[str]) -> None:
        if size < 1 or not rate > 0:
            raise ValueError("size and rate must be above 0")
        self._size, self._period, self._server, self._keys, self._extra = size, 1.0 / rate, server, keys, extra

    def spec(self) -> CameraSpec:
        return CameraSpec(self._size, self._size, noisy=False)

    def open(self, clock: Callable[[], float]) -> None:
        keys = Keys.of_file(Path(self._keys)) if self._keys else None
        self._client = RobotClient(self._server, name="a camera", keys=keys)
        self._clock, self._due, self._number = clock, clock(), 0

    def read(self) -> Frame:
        now = self._clock()
        if now < self._due:
            time.sleep(self._due - now)
        self._due = max(self._due, now) + self._period
        state = self._client.next_state(READ_WITHIN)
        if state["q"] is None:
            raise CameraError("the robot server has no measured joints yet")
        if not self._extra <= state["extra"].keys():
            lacking = ", ".join(sorted(self._extra - state["extra"].keys()))
            raise CameraError(f"{self._server} serves {state['robot']!r}, whose state has no {lacking}")
        self._number += 1
        return Frame(self._draw(state["q"], state["extra"]), state["stamp"], self._number)

    def close(self) -> None:
        self._client.close()

    def _draw(self, q: np.ndarray, extra: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the picture, uint8[size, size, 3]. `q`: measured joints, float64[J]."""
        raise NotImplementedError

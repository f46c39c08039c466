"""Cameras of the fake ALOHA behind a robot server."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from serl_chunk.robots.drawn_camera import DrawnCamera
from serl_chunk.robots.fake.render import render
from serl_chunk.robots.fake.spec import ACTION_DIM, CAMERAS
from serl_chunk_robot.drivers.camera import CameraError


class FakeAlohaCamera(DrawnCamera):
    """One camera of the fake ALOHA.

    The state's `extra` has the cube's centre "cube" float64[3], metres, and "holder" float64[1], the arm that holds it
    or -1.

    Args:
        view: top, left_wrist or right_wrist. See DrawnCamera for the others.
    """

    def __init__(
        self, view: str, size: int = 64, rate: float = 30.0, server: str = "127.0.0.1", keys: str = ""
    ) -> None:
        super().__init__(size, rate, server, keys, frozenset({"cube", "holder"}))
        if view not in CAMERAS:
            raise ValueError(f"view {view!r}: valid are {', '.join(CAMERAS)}")
        self._view = view

    def _draw(self, q: np.ndarray, extra: Mapping[str, np.ndarray]) -> np.ndarray:
        if len(q) != ACTION_DIM:
            raise CameraError(f"{self._server} serves {len(q)} joints, expected {ACTION_DIM}")
        x, y, z = extra["cube"].tolist()
        return render(self._view, self._size, q.tolist(), (x, y, z), extra["holder"][0] >= 0)

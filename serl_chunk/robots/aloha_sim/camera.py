"""Cameras of the simulated ALOHA behind a robot server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from serl_chunk.config.robots import AlohaSimConfig
from serl_chunk.robots.aloha_sim.env import CAMERAS, JOINTS, OBJECT_POSE, SCENES, AlohaSimEnv
from serl_chunk.robots.drawn_camera import DrawnCamera
from serl_chunk.types import IMAGE_PREFIX
from serl_chunk_robot.drivers.camera import CameraError


class AlohaSimCamera(DrawnCamera):
    """One camera of gym-aloha's scene, rendered from a copy that follows the server's state.

    The state's `extra` has "objects" float64[7 N], position (m) and quaternion (w, x, y, z) of each object.

    Args:
        view: a camera of the model. See DrawnCamera for the others.
        env_name: transfer_cube or insertion.
    """

    def __init__(
        self, view: str, env_name: str = "transfer_cube", size: int = 128, rate: float = 30.0,
        server: str = "127.0.0.1", keys: str = "",
    ) -> None:  # fmt: skip
        super().__init__(size, rate, server, keys, frozenset({"objects"}))
        for value, valid in ((view, CAMERAS), (env_name, tuple(SCENES))):
            if value not in valid:
                raise ValueError(f"{value!r}: valid are {', '.join(valid)}")
        self._view, self._objects = view, OBJECT_POSE * len(SCENES[env_name].starts)
        self._config = AlohaSimConfig(env_name=cast("Any", env_name), cameras=(view,), image_size=size)
        self._scene: AlohaSimEnv | None = None

    def close(self) -> None:
        super().close()
        if self._scene is not None:
            self._scene.close()

    def _draw(self, q: np.ndarray, extra: Mapping[str, np.ndarray]) -> np.ndarray:
        if self._scene is None:  # not earlier: the server makes this class too, and needs no simulator
            self._scene = AlohaSimEnv(self._config)
        objects = extra["objects"]
        if len(q) != JOINTS or len(objects) != self._objects:
            raise CameraError(
                f"{self._server} serves {len(q)} joints and {len(objects)} numbers of objects, expected {JOINTS} and "
                f"{self._objects}"
            )
        self._scene.place(q, objects)
        return self._scene.read_images([self._view])[IMAGE_PREFIX + self._view]

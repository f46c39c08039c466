"""Cameras of simulated tasks behind a robot server: each draws the state that it publishes, in its own process."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from serl_chunk.config.robots import AlohaSimConfig
from serl_chunk.robots.aloha_sim import env as aloha_sim
from serl_chunk.robots.fake import spec as fake
from serl_chunk.robots.fake.render import render
from serl_chunk.types import IMAGE_PREFIX
from serl_chunk_robot.client.client import Keys, RobotClient
from serl_chunk_robot.drivers.camera import READ_WITHIN, CameraError, CameraSpec, Frame


class DrawnCamera:
    """Draws square pictures of a served robot. A subclass implements `_draw`.

    Args:
        view: one of `views`.
        size: of the picture, pixels.
        rate: pictures a second.
        server: HOST[:PORT] of the robot server.
        keys: file of a key that the server admits, as `serl-chunk keys join` writes it; empty: it has no keys.

    Raises ValueError: an unknown view, or a size or a rate that gives no picture.
    """

    views: Collection[str]
    extra: frozenset[str]  # what the state's `extra` must have

    def __init__(
        self, view: str, size: int = 64, rate: float = 30.0, server: str = "127.0.0.1", keys: str = ""
    ) -> None:
        if size < 1 or not rate > 0:
            raise ValueError("size and rate must be above 0")
        self._view = _one_of(view, self.views)
        self._size, self._period, self._server, self._keys = size, 1.0 / rate, server, keys

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
        if not self.extra <= state["extra"].keys():
            lacking = ", ".join(sorted(self.extra - state["extra"].keys()))
            raise CameraError(f"{self._server} serves {state['robot']!r}, whose state has no {lacking}")
        self._number += 1
        return Frame(self._draw(state["q"], state["extra"]), state["stamp"], self._number)

    def close(self) -> None:
        self._client.close()

    def _draw(self, q: np.ndarray, extra: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the picture, uint8[size, size, 3]. `q`: measured joints, float64[J]."""
        raise NotImplementedError


class FakeAlohaCamera(DrawnCamera):
    """One camera of the fake ALOHA.

    The state's `extra` has the cube's centre "cube" float64[3], metres, and "holder" float64[1], the arm that holds it
    or -1.
    """

    views, extra = fake.CAMERAS, frozenset({"cube", "holder"})

    def _draw(self, q: np.ndarray, extra: Mapping[str, np.ndarray]) -> np.ndarray:
        if len(q) != fake.ACTION_DIM:
            raise CameraError(f"{self._server} serves {len(q)} joints, expected {fake.ACTION_DIM}")
        x, y, z = extra["cube"].tolist()
        return render(self._view, self._size, q.tolist(), (x, y, z), extra["holder"][0] >= 0)


class AlohaSimCamera(DrawnCamera):
    """One camera of gym-aloha's scene, rendered from a copy that follows the server's state.

    The state's `extra` has "objects" float64[7 N], position (m) and quaternion (w, x, y, z) of each object. `env_name`:
    transfer_cube or insertion. See DrawnCamera for the others.
    """

    views, extra = aloha_sim.CAMERAS, frozenset({"objects"})

    def __init__(
        self, view: str, env_name: str = "transfer_cube", size: int = 128, rate: float = 30.0,
        server: str = "127.0.0.1", keys: str = "",
    ) -> None:  # fmt: skip
        super().__init__(view, size, rate, server, keys)
        starts = aloha_sim.SCENES[_one_of(env_name, aloha_sim.SCENES)].starts
        self._numbers = aloha_sim.JOINTS, aloha_sim.OBJECT_POSE * len(starts)
        self._config = AlohaSimConfig(env_name=cast("Any", env_name), cameras=(view,), image_size=size)
        self._scene: aloha_sim.AlohaSimEnv | None = None

    def close(self) -> None:
        super().close()
        if self._scene is not None:
            self._scene.close()

    def _draw(self, q: np.ndarray, extra: Mapping[str, np.ndarray]) -> np.ndarray:
        if self._scene is None:  # not earlier: the server makes this class too, and needs no simulator
            self._scene = aloha_sim.AlohaSimEnv(self._config)
        objects, got = extra["objects"], (len(q), len(extra["objects"]))
        if got != self._numbers:
            raise CameraError("{} serves {} joints and {} numbers of objects, expected {} and {}".format(
                self._server, *got, *self._numbers))  # fmt: skip
        self._scene.place(q, objects)
        return self._scene.read_images([self._view])[IMAGE_PREFIX + self._view]


def _one_of(value: str, valid: Collection[str]) -> str:
    if value not in valid:
        raise ValueError(f"{value!r}: valid are {', '.join(valid)}")
    return value

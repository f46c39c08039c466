"""Cameras of the fake ALOHA behind a robot server: they draw what the server's state says."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from serl_chunk.robots.fake.render import render
from serl_chunk.robots.fake.spec import ACTION_DIM, CAMERAS
from serl_chunk_robot.camera import READ_WITHIN, CameraError, CameraSpec, Frame
from serl_chunk_robot.client import Keys, RobotClient


class FakeAlohaCamera:
    """One camera of the fake ALOHA, in a process of its own.

    It follows the state that the robot server publishes: 14 joints, and in `extra` the cube's centre "cube" float64[3],
    metres, and "holder" float64[1], the arm that holds it or -1.

    Args:
        view: top, left_wrist or right_wrist.
        size: of the square picture, pixels.
        rate: pictures a second.
        server: HOST[:PORT] of the robot server.
        keys: file of a key that the server admits, as `serl-chunk keys join` writes it; empty: it has no keys.
    """

    def __init__(
        self, view: str, size: int = 64, rate: float = 30.0, server: str = "127.0.0.1", keys: str = ""
    ) -> None:
        if view not in CAMERAS:
            raise ValueError(f"view {view!r}: valid are {', '.join(CAMERAS)}")
        if size < 1 or not rate > 0:
            raise ValueError("size and rate must be above 0")
        self._view, self._size, self._period, self._server, self._keys = view, size, 1.0 / rate, server, keys

    def spec(self) -> CameraSpec:
        return CameraSpec(self._size, self._size, noisy=False)

    def open(self, clock: Callable[[], float]) -> None:
        keys = Keys.of_file(Path(self._keys)) if self._keys else None
        self._client = RobotClient(self._server, name=f"camera {self._view}", keys=keys)
        self._clock, self._due, self._number = clock, clock(), 0

    def read(self) -> Frame:
        now = self._clock()
        if now < self._due:
            time.sleep(self._due - now)
        self._due = max(self._due, now) + self._period
        state = self._client.next_state(READ_WITHIN)
        q, extra = state["q"], state["extra"]
        if q is None:
            raise CameraError("the robot server has no measured joints yet")
        if len(q) != ACTION_DIM or not {"cube", "holder"} <= extra.keys():
            raise CameraError(f"{self._server} serves {state['robot']!r}, which is no fake ALOHA")
        x, y, z = extra["cube"].tolist()
        self._number += 1
        image = render(self._view, self._size, q.tolist(), (x, y, z), extra["holder"][0] >= 0)
        return Frame(image, state["stamp"], self._number)

    def close(self) -> None:
        self._client.close()

"""The newest pictures of a robot server's cameras for a viewer, on a connection of its own.

The control loop's connection is the loop's alone, and it takes pictures within episodes only.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from serl_chunk.config.robots import RobotConfig
from serl_chunk.types import SerlChunkError
from serl_chunk_robot.client.client import Keys, RobotClient

logger = logging.getLogger(__name__)

AGAIN = 2.0  # seconds between two attempts to connect


class SeenPicture(NamedTuple):
    """A picture of a camera."""

    image: np.ndarray  # uint8[H, W, 3], RGB, read-only
    serial: int  # differs from that of every other picture of the camera
    moment: float  # monotonic seconds of this machine when the first of equal pictures was taken


class ServedPictures:
    """Pictures of all cameras of `config.server`. It connects on use, so that nothing is sent while no one looks.

    Thread-safe. A server that does not answer has no pictures.
    """

    def __init__(self, config: RobotConfig, name: str) -> None:
        self._config, self._name = config, name
        self._lock = threading.Lock()
        self._client: RobotClient | None = None
        self._failed = -AGAIN

    def newest(self) -> dict[str, SeenPicture]:
        """Return the newest picture of each camera that has one."""
        with self._lock:
            try:
                return self._newest()
            except SerlChunkError as e:
                logger.debug(f"pictures: {e}")
                self._failed = time.monotonic()
                self._disconnect()
                return {}

    def rest(self) -> None:
        """Disconnect until pictures are requested again."""
        with self._lock:
            self._disconnect()

    def _newest(self) -> dict[str, SeenPicture]:
        if self._client is None:
            if time.monotonic() - self._failed < AGAIN:
                return {}
            config = self._config
            keys = Keys.of_file(Path(config.server_keys).expanduser()) if config.server_keys else None
            self._client = RobotClient(config.server, name=self._name, role="any", keys=keys)
        client, found = self._client, {}
        cameras = [name for name, *_ in client.cameras()]
        client.newest_state()  # its messages carry the server's clock
        for name in cameras:
            picture = client.newest_picture(name)
            age = client.server_time() - picture.changed if picture is not None else np.nan
            if picture is not None and np.isfinite(age):
                found[name] = SeenPicture(picture.image, picture.number, time.monotonic() - max(0.0, age))
        return found

    def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

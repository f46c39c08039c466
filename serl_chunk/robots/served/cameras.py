"""Cameras of a robot server as an environment reads them, and whether their pictures can be decided on."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from serl_chunk.config.robots import RobotConfig
from serl_chunk.robots.served import connect
from serl_chunk.types import ConfigError, RobotSpec, SerlChunkError
from serl_chunk_robot.client.client import Picture, RobotClient, RobotError

logger = logging.getLogger(__name__)

HELD_S = 1.0  # an episode ends in which a camera gives nothing new, or the robot may not move, for so long
REMIND_S = 10.0  # between two lines meanwhile
STALE_S = 0.2  # a picture that is older is not decided on; a repeated one is as old as the first of its kind
FIRST_S = 2.0  # for the first picture of a camera that no episode watches
POLL_S = 0.005
AGAIN = 2.0  # seconds between two attempts to connect


class ServedCameras:
    """The cameras of `client`'s server. Only those that are watched are received, and only these can be unseen.

    `unseen` is why one cannot be decided on, as of the last look; empty where all can.

    Raises ConfigError where a camera of `spec` that the server has differs in size.
    """

    def __init__(self, client: RobotClient, spec: RobotSpec, server: str) -> None:
        self._client, self._spec, self._server = client, spec, server
        self._watched: dict[str, Picture | None] = {}  # the newest picture of each camera that is read
        self.unseen = ""
        self._unseen_since = self._reminded = 0.0
        there = {name for name, *_ in client.cameras()}
        for name in there & {camera.name for camera in spec.cameras}:
            self._check(name)

    def watch(self, cameras: Sequence[str]) -> None:
        """Receive these cameras from now on. Raises ConfigError for one that the server lacks or has in another
        size.
        """
        for name in cameras:
            if name not in self._watched:
                self._check(name)
                self._watched[name] = None
                self._client.newest_picture(name)  # subscribes

    def begin(self) -> None:
        self._unseen_since = self._reminded = 0.0

    def look(self) -> str:
        """Take the newest pictures; returns `unseen`."""
        now, reasons = self._client.server_time(), []
        for name in self._watched:
            try:
                reasons.append(self._look(name, now))
            except RobotError as e:  # a server that was started anew without it
                reasons.append(str(e))
        self.unseen = "; ".join(filter(None, reasons))
        return self.unseen

    def look_in_tick(self) -> str:
        """Take the newest pictures; returns why the episode ends, or nothing."""
        unseen, now = self.look(), time.monotonic()
        if not unseen:
            self._unseen_since = 0.0
            return ""
        self._unseen_since = self._unseen_since or now
        if now - self._reminded > REMIND_S:
            self._reminded = now
            logger.warning(f"no decisions: {unseen}")
        return unseen if now - self._unseen_since > HELD_S else ""

    def image(self, name: str) -> np.ndarray | None:
        """Return the picture that was taken last, uint8[H, W, 3] and read-only; None where there was none.

        A camera that was not watched is from now on, and its first picture is waited for.
        """
        if name not in self._watched:
            self.watch([name])
            ends = time.monotonic() + FIRST_S
            while self._watched[name] is None and time.monotonic() < ends:
                with contextlib.suppress(RobotError):  # a server that was started anew without it
                    self._look(name, self._client.server_time())
                time.sleep(POLL_S)
        picture = self._watched[name]
        return None if picture is None else picture.image

    def ages(self) -> dict[str, float]:
        now = self._client.server_time()
        return {name: now - picture.changed for name, picture in self._watched.items() if picture is not None}

    def numbers(self) -> dict[str, int]:
        return {name: picture.number for name, picture in self._watched.items() if picture is not None}

    def captured(self) -> float | None:
        """Return when the oldest of these pictures was taken, s on the server's clock; None without any."""
        return min((picture.changed for picture in self._watched.values() if picture is not None), default=None)

    def _look(self, name: str, now: float) -> str:
        picture = self._client.newest_picture(name)
        if picture is None:
            return f"camera {name!r}: no picture yet"
        camera = self._spec.camera(name)
        if picture.image.shape != (camera.height, camera.width, 3):
            return f"camera {name!r}: its pictures are of {picture.image.shape[:2]} pixels now"
        self._watched[name] = picture
        # No sensor gives two equal pictures: a repeated one is of the moment `changed`, when it came first. Each one of
        # a camera without noise is new.
        if not now - picture.changed <= STALE_S:
            repeats = now - picture.moment <= STALE_S
            what = "the same picture" if repeats else "no new picture"
            return f"camera {name!r}: {what} for {now - picture.changed:.1f} s"
        return ""

    def _check(self, name: str) -> None:
        """Raise ConfigError where a camera of the specification is not the server's."""
        camera = self._spec.camera(name)
        sizes = {name: (height, width) for name, height, width, _ in self._client.cameras()}
        if name not in sizes:
            what = f"no camera {name!r} (it has {', '.join(sizes) or 'none'})"
            remedy = "Add a table [[camera]] with this name to its robot.toml, or use an agent and a recording without"
        elif sizes[name] != (camera.height, camera.width):
            height, width = sizes[name]
            what = f"camera {name!r} with {height} x {width} pixels, expected {camera.height} x {camera.width}"
            remedy = "Set the same size in its robot.toml and in the experiment"
        else:
            return
        raise ConfigError(f"{self._server} has {what}. {remedy}", parameter="robot.server")


class SeenPicture(NamedTuple):
    """A picture of a camera."""

    image: np.ndarray  # uint8[H, W, 3], RGB, read-only
    serial: int  # differs from that of every other picture of the camera
    moment: float  # monotonic seconds of this machine when the first of equal pictures was taken
    view: Sequence[int | str] | None = None  # x, y, width, height, rotate, flip of its table; None: not known


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
        with self._lock:
            try:
                return self._newest()
            except SerlChunkError as e:
                logger.debug(f"pictures: {e}")
                self._failed = time.monotonic()
        self.rest()
        return {}

    def rest(self) -> None:
        """Disconnect until pictures are requested again."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _newest(self) -> dict[str, SeenPicture]:
        if self._client is None:
            if time.monotonic() - self._failed < AGAIN:
                return {}
            self._client = connect(self._config, self._name)
        client, found = self._client, {}
        cameras, views = client.cameras(), client.views()
        client.newest_state()  # its messages carry the server's clock
        for name, *_ in cameras:
            picture = client.newest_picture(name)
            age = client.server_time() - picture.changed if picture is not None else np.nan
            if picture is not None and np.isfinite(age):
                moment = time.monotonic() - max(0.0, age)
                found[name] = SeenPicture(picture.image, picture.number, moment, views.get(name))
        return found

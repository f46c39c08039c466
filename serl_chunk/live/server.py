"""The server of a running actor's page: events of its state, camera pictures, and the keys of its viewers.

Everything here runs on threads of the server. The control loop puts values into a `LiveFeed`, takes requests out of its
operator, and waits for none of both.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serl_chunk.console.bindings import Action, bind_keys
from serl_chunk.console.feed import LiveFeed
from serl_chunk.live.content import Cursor, Pictures, info, shown_robot, state_json
from serl_chunk.live.viewers import RefusedError, Viewers
from serl_chunk.types import RobotSpec
from serl_chunk.viz.local_server import Answer, LocalHandler, LocalServer, RequestError, file_answer, json_answer

if TYPE_CHECKING:
    from serl_chunk.operator.operator import Operator
    from serl_chunk.robots.served.cameras import ServedPictures

PERIOD = 0.1  # seconds between two events of a viewer; pictures are requested once for each event at most
STALL = 5.0  # seconds that a viewer may read nothing before its events end
BUFFER = 1 << 16  # bytes for a viewer that reads slowly: what it gets is young
ASSETS = Path(__file__).parent / "page"
_NAME = re.compile(r"[0-9a-f]{16,64}")


class LivePage(LocalServer):
    """The page of a running actor. The port is taken at once; requests are answered from `begin` on.

    `port`: 0 takes a free one. Raises ConfigError, which names `viewer`, for a port that cannot be used.
    """

    operator: Operator
    feed: LiveFeed
    spec: RobotSpec
    viewers: Viewers
    pictures: Pictures
    info: dict[str, object]
    cameras: ServedPictures | None
    block_on_close = False  # a viewer's thread ends by itself

    def __init__(self, port: int) -> None:
        self.ending = threading.Event()
        self._streams, self._lock = 0, threading.Lock()
        self._thread: threading.Thread | None = None
        super().__init__(_Handler, port, parameter="viewer", printed_by="the actor")

    def begin(
        self, operator: Operator, feed: LiveFeed, spec: RobotSpec, *, title: str,
        keys: Mapping[str, Action] | None = None, cameras: ServedPictures | None = None,
    ) -> None:  # fmt: skip
        """Show an actor.

        Args:
            keys: of `bind_keys`.
            cameras: of pictures that come from elsewhere than the control loop, and also between episodes.
        """
        self.operator, self.feed, self.spec, self.cameras = operator, feed, spec, cameras
        self.viewers = Viewers(operator, bind_keys() if keys is None else keys)
        self.pictures = Pictures(self.frames)
        self.info = info(spec, self.viewers.bindings, title, served=cameras is not None)
        self._thread = threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.2}, name="live page", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End. Viewers that are connected read that the actor has ended."""
        self.ending.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            self.shutdown()
            thread.join()
        self.server_close()

    def frames(self) -> Mapping[str, Any]:
        """Return the newest frames: of the cameras where they have any, else those that the control loop took."""
        return self.feed.frames if self.cameras is None else {**self.feed.frames, **self.cameras.newest()}

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        """Count a viewer that reads events. Without one the cameras rest."""
        with self._lock:
            self._streams += 1
        try:
            yield
        finally:
            with self._lock:
                self._streams -= 1
                if self._streams == 0 and self.cameras is not None:
                    self.cameras.rest()


class _Handler(LocalHandler):
    server: LivePage

    def get(self, path: list[str]) -> Answer | None:
        server = self.server
        match path:
            case [""]:
                return file_answer(ASSETS / "live.html")
            case ["live.css" | "live.js" as name]:
                return file_answer(ASSETS / name)
            case ["info"]:
                return json_answer(server.info)
            case ["events", name]:
                self._events(_checked(name))
                return None
            case ["picture", camera, _]:
                if (file := server.pictures.get(camera)) is not None:
                    return "image/jpeg", file, False
        raise RequestError(HTTPStatus.NOT_FOUND, "no such page")

    def post(self, path: list[str]) -> Answer:
        viewers = self.server.viewers
        match path:
            case ["here" | "take" | "release" | "press" as what, name]:
                name, body = _checked(name), self.body()
                try:
                    if what == "press":
                        seen = body.get("seen")
                        moment = float(seen) if isinstance(seen, int | float) and abs(seen) < 1e15 else -math.inf
                        viewers.press(
                            name, str(body.get("key")), str(body.get("word")), moment, body.get("proposed"),
                            robot=shown_robot(body.get("robot")),
                        )  # fmt: skip
                    else:
                        {"here": viewers.here, "take": viewers.take, "release": viewers.release}[what](name)
                except RefusedError as error:
                    raise RequestError(HTTPStatus.CONFLICT, error.message) from error
                return json_answer(viewers.view(name))
        raise RequestError(HTTPStatus.NOT_FOUND, "no such page")

    def _events(self, name: str) -> None:
        """Send an event each `PERIOD` seconds until the viewer leaves or reads nothing."""
        server = self.server
        try:
            server.viewers.here(name)
        except RefusedError as error:
            raise RequestError(HTTPStatus.CONFLICT, error.message) from error
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        self.connection.settimeout(STALL)
        self.head(HTTPStatus.OK, "text/event-stream")
        cursor = Cursor(server.feed, server.spec, server.frames)
        with server.stream(), contextlib.suppress(ConnectionError, TimeoutError):
            while True:
                state = server.operator.view
                event = {"state": state_json(state), "control": server.viewers.view(name), **cursor.news(state)}
                text = json.dumps(event, allow_nan=False, separators=(",", ":"))
                self.wfile.write(f"data: {text}\n\n".encode())
                if server.ending.wait(PERIOD):
                    self.wfile.write(b"event: end\ndata:\n\n")
                    return


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise RequestError(HTTPStatus.BAD_REQUEST, "a viewer's name is 16 to 64 hexadecimal digits")
    return name

"""Which keys a robot's server admits, and which of them are operators'.

A folder as `serl-chunk keys` makes it: server.json with the server's pair, and allowed/NAME.json with the "public" key
of one client and, for an operator, "role": "operator". A file with "revoked" other than false admits no one. A thread
of its own reads the folder again after a change of it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, Deque, Dict, List, NamedTuple, Optional, Tuple

import zmq

from serl_chunk_robot.errors import ConfigError
from serl_chunk_robot.safety.table import ANY, OPERATOR
from serl_chunk_robot.wire import curve
from serl_chunk_robot.wire.codec import Frame
from serl_chunk_robot.wire.sockets import is_loopback

logger = logging.getLogger(__name__)

ENDPOINT = "inproc://zeromq.zap.01"  # fixed by ZeroMQ's RFC 27
READ_AGAIN = 0.5  # s
LOOK_AGAIN = 0.02  # s between two looks at the folder for keys that are not known
SETTLED = 0.1  # s after a change before files that look the same are taken for the same
LOGGED, LOGGED_PER = 10, 60.0  # refused keys that are logged within so many s; others are counted


class Key(NamedTuple):
    """An admitted key: the name of its file, and the most that its holder may be."""

    name: str
    role: str


def read_allowed(folder: Path) -> Dict[str, Key]:
    """Return the admitted keys of a folder by their public halves. Raises ConfigError."""
    allowed = folder / "allowed"
    keys: Dict[str, Key] = {}
    try:
        for each in (folder, allowed):
            curve.check_folder(each)
        files = sorted(Path(entry.path) for entry in os.scandir(str(allowed)))
    except OSError as e:
        raise ConfigError(f"{allowed} cannot be read: {e.strerror}") from e
    for path in files:
        if path.suffix != ".json" or path.name.startswith("."):
            continue
        values = curve.read(path)
        role = values.get("role", ANY)
        if role not in (ANY, OPERATOR):
            raise curve.damaged(path, 'its "role"')
        if values.get("public") and values.get("revoked", False) is False:
            keys[curve.key_of(path, values, "public")] = Key(path.stem, role)
    return keys


def _look(folder: Path) -> Tuple[List[Tuple[Any, ...]], float]:
    """Return what shows that a folder of keys has changed, and the wall clock's seconds of its last change."""
    allowed, newest = folder / "allowed", 0.0
    files: List[Tuple[Any, ...]] = []
    with contextlib.suppress(OSError):  # reading it will say why
        for path in (str(folder), str(allowed), *(entry.path for entry in os.scandir(str(allowed)))):
            found = os.stat(path)
            files.append((path, found.st_ino, found.st_size, found.st_mode, found.st_mtime_ns, found.st_ctime_ns))
            newest = max(newest, found.st_mtime, found.st_ctime)
    return sorted(files), newest


class Address(NamedTuple):
    """Where a server takes requests; it publishes the state at the next port. `keys`: their folder."""

    host: str
    port: int
    keys: Optional[Path] = None

    def check(self) -> None:
        """Raise ConfigError for an address that other machines reach, without keys."""
        if self.keys is None and not is_loopback(self.host):
            raise ConfigError(
                f"{self.host}: other machines reach this address, and no keys are set. Set the folder of keys, or use "
                "127.0.0.1."
            )


class Admission:
    """Answers libzmq's requests about keys (ZAP). Make it before the first of the context's sockets is bound.

    `folder`: of the keys. Raises ConfigError: the folder cannot be used.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], folder: Path) -> None:
        self._folder, self._pair = folder, curve.server_pair(folder, curve.NO_SERVER)
        self._seen, self._looked_at = _look(folder), time.monotonic()
        self.keys = read_allowed(folder)  # replaced whole, never changed
        self._failed = ""
        self.refused = 0
        self._lines: Deque[float] = deque(maxlen=LOGGED)  # when the last ones were logged
        self._end = threading.Event()
        self._socket = context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind(ENDPOINT)
        self._thread = threading.Thread(target=self._serve, name="keys", daemon=True)
        self._thread.start()

    @property
    def public(self) -> str:
        return self._pair.public

    def secure(self, s: zmq.Socket[bytes]) -> None:
        """Make a socket require a key. Call it before the socket is bound."""
        curve.require_keys(s, self._pair)

    def key_of(self, frame: Frame) -> Optional[Key]:
        """The key that a received frame came with; None for one that was revoked since."""
        try:
            return self.keys.get(str(frame.get("User-Id"))) if isinstance(frame, zmq.Frame) else None
        except zmq.ZMQError:
            return None

    def close(self) -> None:
        """End the thread: no new connection is admitted from then on."""
        self._end.set()
        self._thread.join()

    def _serve(self) -> None:
        while not self._end.is_set():
            if self._socket.poll(int(1e3 * READ_AGAIN)):
                self._answer(self._socket.recv_multipart())
            else:
                self._read()
        self._socket.close()

    def _read(self) -> None:
        self._looked_at = time.monotonic()
        seen = _look(self._folder)
        if seen == self._seen and not self._failed and time.time() - seen[1] > SETTLED:
            return
        try:
            self.keys = read_allowed(self._folder)
            self._seen, self._failed = seen, ""
        except (ConfigError, OSError) as e:  # revokes no key, and admits no new peer
            if str(e) != self._failed:
                logger.error("keys cannot be checked, so no new peer is admitted: %s", e)
            self._failed = str(e)

    def _answer(self, frames: list[bytes]) -> None:
        if len(frames) < 9:
            return
        client, empty, version, request, _, address, _, mechanism = frames[:8]
        public = curve.to_text(frames[8]) if mechanism == b"CURVE" and len(frames[8]) == 32 else ""
        now = time.monotonic()
        if public in self.keys or now - self._looked_at > LOOK_AGAIN:  # not for each key of a flood
            self._read()
        admitted = not self._failed and public in self.keys
        if not admitted:
            self.refused += 1
            if len(self._lines) < LOGGED or now - self._lines[0] > LOGGED_PER:
                self._lines.append(now)
                key, peer = curve.fingerprint(public), address.decode(errors="replace")
                logger.warning("refused the key %s from %s; %d so far", key, peer, self.refused)
        status = b"200" if admitted else b"500" if self._failed else b"400"
        user = public.encode() if admitted else b""
        self._socket.send_multipart([client, empty, version, request, status, b"", user, b""])

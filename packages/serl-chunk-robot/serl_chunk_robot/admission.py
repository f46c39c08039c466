"""Which keys a robot's server admits, and which of them are operators'.

A folder as `serl-chunk keys` makes it: server.json with the server's pair, and allowed/NAME.json with the "public" key
of one client and, for an operator, "role": "operator". A file with "revoked" other than false admits no one. The
folder is read again by a thread of its own, so that no disk is in the way of the control loop.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Dict, NamedTuple, Optional

import zmq

from serl_chunk_robot.errors import ConfigError
from serl_chunk_robot.safety.table import ANY, OPERATOR
from serl_chunk_robot.wire.codec import Frame
from serl_chunk_robot.wire.curve import Pair, check_folder, damaged, fingerprint, key_of, read, require_keys, to_text
from serl_chunk_robot.wire.sockets import is_loopback

logger = logging.getLogger(__name__)

ENDPOINT = "inproc://zeromq.zap.01"  # fixed by ZeroMQ's RFC 27
READ_AGAIN = 0.5  # s


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
            check_folder(each)
        files = sorted(Path(entry.path) for entry in os.scandir(str(allowed)))
    except OSError as e:
        raise ConfigError(f"{allowed} cannot be read: {e.strerror}") from e
    for path in files:
        if path.suffix != ".json" or path.name.startswith("."):
            continue
        values = read(path)
        role = values.get("role", ANY)
        if role not in (ANY, OPERATOR):
            raise damaged(path, 'its "role"')
        if values.get("public") and values.get("revoked", False) is False:
            keys[key_of(path, values, "public")] = Key(path.stem, role)
    return keys


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

    Args:
        folder: of the keys.

    Raises:
        ConfigError: the folder cannot be used.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], folder: Path) -> None:
        path = folder / "server.json"
        self._folder, self._pair = folder, Pair.of_secret(key_of(path, read(path), "secret"))
        self.keys = read_allowed(folder)  # replaced whole, never changed
        self._failed = ""
        self._end = threading.Event()
        self._socket = context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind(ENDPOINT)
        self._thread = threading.Thread(target=self._serve, name="keys", daemon=True)
        self._thread.start()

    @property
    def public(self) -> str:
        """The server's public key, Z85."""
        return self._pair.public

    def secure(self, s: zmq.Socket[bytes]) -> None:
        """Make a socket require a key. Call it before the socket is bound."""
        require_keys(s, self._pair)

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
            asked = self._socket.poll(int(1e3 * READ_AGAIN))
            readable = self._read()
            if asked:
                self._answer(self._socket.recv_multipart(), readable)
        self._socket.close()

    def _read(self) -> bool:
        try:
            self.keys = read_allowed(self._folder)
            self._failed = ""
        except (ConfigError, OSError) as e:  # revokes no key, and admits no new peer
            if str(e) != self._failed:
                logger.error("keys cannot be checked, so no new peer is admitted: %s", e)
            self._failed = str(e)
        return not self._failed

    def _answer(self, frames: list[bytes], readable: bool) -> None:
        if len(frames) < 9:
            return
        client, empty, version, request, _, address, _, mechanism = frames[:8]
        public = to_text(frames[8]) if mechanism == b"CURVE" and len(frames[8]) == 32 else ""
        admitted = readable and public in self.keys
        if not admitted:
            logger.warning("refused the key %s from %s", fingerprint(public), address.decode(errors="replace"))
        status = b"200" if admitted else b"400" if readable else b"500"
        user = public.encode() if admitted else b""
        self._socket.send_multipart([client, empty, version, request, status, b"", user, b""])

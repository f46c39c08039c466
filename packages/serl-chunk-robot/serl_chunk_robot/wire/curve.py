"""Key pairs, the files that hold keys, and CURVE on a socket.

Files of keys are JSON, 0600 in folders that no other user can write to; those that others can read are refused. A
server's folder has its pair in server.json, and the key of each client in allowed/NAME.json.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import stat
import struct
from pathlib import Path
from typing import Any, Callable

import zmq
from zmq.utils import z85

from serl_chunk_robot.errors import ConfigError

NO_SERVER = "has no server's keys (no server.json). Make them on its machine: serl-chunk-robot keys FOLDER"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")  # of a client
_DOMAIN = b"serl-chunk"


def default_folder() -> Path:
    """Return `$XDG_CONFIG_HOME/serl-chunk/keys`, or `~/.config/serl-chunk/keys`."""
    base = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    return (base if base.is_absolute() else Path("~/.config").expanduser()) / "serl-chunk" / "keys"


def fingerprint(public: str) -> str:
    """Return twelve hexadecimal digits that stand for a public key in messages."""
    return hashlib.sha256(public.encode()).hexdigest()[:12]


@dataclasses.dataclass(frozen=True)
class Pair:
    """A key pair, both halves as 40 characters of Z85. The secret is in no `repr`."""

    public: str
    secret: str = dataclasses.field(repr=False)

    @classmethod
    def new(cls) -> Pair:
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())

    @classmethod
    def of_secret(cls, secret: str) -> Pair:
        return cls(zmq.curve_public(secret.encode()).decode(), secret)


def to_text(key: bytes) -> str:
    """Encode 32 bytes as Z85."""
    return z85.encode(key).decode()


def to_bytes(key: str) -> bytes:
    """Decode Z85 to 32 bytes."""
    return z85.decode(key.encode())


def damaged(path: Path, what: str) -> ConfigError:
    """Return the error for a file that cannot be understood."""
    return ConfigError(f"{path} is damaged: {what} cannot be read. Restore it, or remove it and join or add it again")


def key_of(path: Path, value: dict[str, Any], name: str) -> str:
    """Return the key in a field, Z85. Raises ConfigError."""
    key = value.get(name)
    try:
        if isinstance(key, str) and len(key) == 40 and to_text(to_bytes(key)) == key:
            return key
    except (LookupError, ValueError, struct.error):  # a character, or a number, that Z85 does not have
        pass
    raise damaged(path, f"its key {name!r}")


def read(path: Path) -> dict[str, Any]:
    """Return the content of a file. Raises ConfigError."""
    try:
        with path.open() as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            value = {} if mode & 0o077 else json.load(file)
    except OSError as e:
        raise ConfigError(f"{path} cannot be read: {e.strerror}") from e
    except (ValueError, RecursionError) as e:  # not UTF-8 among them
        raise damaged(path, "its JSON") from e
    if mode & 0o077:
        raise ConfigError(f"{path} is open to other users (mode {mode:04o}, expected 0600). Run chmod 600 {path}")
    if not isinstance(value, dict):
        raise damaged(path, "its JSON")
    return value


def check_folder(folder: Path) -> None:
    """Raise ConfigError where other users can put files: they could let any machine in."""
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & 0o022:
        raise ConfigError(f"{folder} can be written by other users (mode {mode:04o}). Run chmod 700 {folder}")


def make_folder(folder: Path) -> None:
    """Make a folder of this user's, where it is not there. Raises ConfigError, OSError."""
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    check_folder(folder)


def write(path: Path, values: dict[str, Any], place: Callable[[str, str], None] = os.replace) -> None:
    """Write a file whole or not at all, never readable by others for a moment, and durably.

    A power cut must not bring a used key back, or forget a machine that joined; and a running server reads the folder.
    `place`: `os.link` replaces no file: it raises FileExistsError. Raises OSError: it cannot be written.
    """
    part = path.with_name(f".{path.name}.part{os.getpid()}")
    try:
        with os.fdopen(os.open(str(part), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(values, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        place(str(part), str(path))
        names = os.open(str(path.parent), os.O_RDONLY)
        os.fsync(names)
        os.close(names)
    finally:
        if part.exists():
            part.unlink()


def server_pair(folder: Path, missing: str) -> Pair:
    """Return the pair of a server's folder. `missing`: what to say where there is none. Raises ConfigError."""
    path = folder / "server.json"
    if not path.exists():
        raise ConfigError(f"{folder} {missing}")
    return Pair.of_secret(key_of(path, read(path), "secret"))


def client_file(folder: Path, name: str) -> Path:
    """Return the file of a client's key in a server's folder. Raises ConfigError for what is no name."""
    if not NAME.fullmatch(name):
        raise ConfigError(f"key name {name!r}: use 1..64 letters, digits, '-', '_' or '.', the first a letter or digit")
    return folder / "allowed" / f"{name}.json"


def use_keys(s: zmq.Socket[bytes], server: str, pair: Pair) -> None:
    """Make a socket that is not connected yet prove `pair` and accept only the server with this public key."""
    s.curve_serverkey = server.encode()
    s.curve_publickey = pair.public.encode()
    s.curve_secretkey = pair.secret.encode()


def require_keys(s: zmq.Socket[bytes], pair: Pair) -> None:
    """Make a socket that is not bound yet prove `pair` and admit only peers that this context's authenticator admits.

    The authenticator answers requests at `inproc://zeromq.zap.01` (ZeroMQ's RFC 27). No peer is admitted without one.
    """
    s.curve_server = True
    s.curve_secretkey = pair.secret.encode()
    s.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
    s.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

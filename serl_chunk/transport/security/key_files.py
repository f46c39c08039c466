"""Files that hold keys: JSON, 0600, written whole or not at all; what others can read or change is refused."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zmq.utils import z85

from serl_chunk.io import fsync_path
from serl_chunk.types import ConfigError


def damaged(path: Path, what: str) -> ConfigError:
    """What to raise for a file that cannot be understood."""
    return ConfigError(f"{path} is damaged: {what} cannot be read. Restore it, or remove it and join or add it again")


def key_of(path: Path, value: dict[str, Any], name: str) -> str:
    """The key in a field, Z85; raises ConfigError."""
    key = value.get(name)
    try:
        if isinstance(key, str) and len(key) == 40 and z85.encode(z85.decode(key.encode())).decode() == key:
            return key
    except (LookupError, ValueError, struct.error):  # a character, or a number, that Z85 does not have
        pass
    raise damaged(path, f"its key {name!r}")


def read(path: Path) -> dict[str, Any]:
    """What is in a file; raises ConfigError."""
    try:
        with path.open() as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = "" if mode & 0o077 else file.read()
    except OSError as e:
        raise ConfigError(f"{path} cannot be read: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise damaged(path, "its JSON") from e
    if mode & 0o077:
        raise ConfigError(f"{path} is open to other users (mode {mode:04o}) and is not used: chmod 600 {path}")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise damaged(path, "its JSON") from e
    if not isinstance(value, dict):
        raise damaged(path, "its JSON")
    return value


def write(path: Path, value: dict[str, Any]) -> None:
    """Write a file whole or not at all, never readable by others for a moment; raises ConfigError."""
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        _make_folder(path.parent)
        new.unlink(missing_ok=True)
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(value, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
        fsync_path(path.parent)  # else a power cut could bring a used line back, or forget who joined
    except OSError as e:
        raise ConfigError(f"{path} cannot be written: {e.strerror}") from e


def _make_folder(folder: Path) -> None:
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    check_folder(folder)


def check_folder(folder: Path) -> None:
    """A user who can put a file there can let any machine in."""
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & 0o022:
        raise ConfigError(f"other users can write to {folder} (mode {mode:04o}): chmod 700 {folder}")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Let one process at a time change the folder."""
    try:
        _make_folder(folder)
        lock = os.open(folder / ".lock", os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except BaseException:
            os.close(lock)
            raise
    except OSError as e:
        raise ConfigError(f"the key folder {folder} cannot be used: {e.strerror}") from e
    try:
        yield
    finally:
        os.close(lock)

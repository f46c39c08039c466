"""The robot server's folder of keys, as `admission` reads it: made, a client admitted, a client revoked.

    server.json           the server's pair
    allowed/NAME.json     the public key of one client, and for an operator its role
    NAME.json             what a client proves, to be moved to its machine (`client.Keys`)

All files are 0600 in folders of 0700, and none is overwritten, but for "revoked" of a client.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, Dict, Optional, Tuple

from serl_chunk_robot.errors import ConfigError
from serl_chunk_robot.safety.table import OPERATOR
from serl_chunk_robot.wire.curve import Pair, check_folder, fingerprint, key_of, read

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


def make(folder: Path) -> str:
    """Make the server's keys; returns their fingerprint. Raises ConfigError, where there are some among others."""
    path, pair = folder / "server.json", Pair.new()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_folder(folder)
        (folder / "allowed").mkdir(mode=0o700, exist_ok=True)
        check_folder(folder / "allowed")
        _write_new(path, {"public": pair.public, "secret": pair.secret})
    except FileExistsError as e:
        raise ConfigError(f"{path} exists already, and every client knows it. Admit a client with --add NAME.") from e
    except OSError as e:
        raise ConfigError(f"{folder} cannot hold keys: {e.strerror}. Give a folder of this user's.") from e
    return fingerprint(pair.public)


def add(folder: Path, name: str, out: Optional[Path] = None, *, operator: bool = False) -> Tuple[Path, str]:
    """Admit a client under a name that is new.

    Args:
        out: the client's own file; None: NAME.json next to the folder.

    Returns:
        that file, and the fingerprint of the client's key.

    Raises:
        ConfigError: the folder has no server's keys, the name or the file is taken, or a file cannot be written.
    """
    server, own, allowed = _server(folder), Pair.new(), _allowed(folder, name)
    if allowed.exists():
        raise ConfigError(f"{allowed} exists already. Choose another name, or remove that file first.", parameter=name)
    out = folder.resolve().parent / f"{name}.json" if out is None else out
    role = {"role": OPERATOR} if operator else {}
    try:
        _write_new(out, {"server": server.public, "secret": own.secret})
    except FileExistsError as e:
        raise ConfigError(f"{out} exists already. Choose another file with --out FILE.", parameter=name) from e
    except OSError as e:
        raise ConfigError(f"{out} cannot be written: {e.strerror}. Choose another file with --out FILE.",
                          parameter=name) from e  # fmt: skip
    try:
        _place(allowed, {"public": own.public, **role}, os.link)
    except OSError as e:
        out.unlink()
        raise ConfigError(f"{allowed} cannot be written: {e.strerror}.", parameter=name) from e
    return out, fingerprint(own.public)


def revoke(folder: Path, name: str) -> str:
    """Admit a client no longer; returns its key's fingerprint. Raises ConfigError."""
    _server(folder)
    path = _allowed(folder, name)
    if not path.exists():
        names = ", ".join(sorted(each.stem for each in path.parent.glob("[!.]*.json"))) or "none"
        raise ConfigError(f"no key of that name in {path.parent}. It has: {names}.", parameter=name)
    values = read(path)
    public = key_of(path, values, "public")
    try:
        _place(path, {**values, "revoked": True}, os.replace)
    except OSError as e:
        raise ConfigError(f"{path} cannot be written: {e.strerror}. Remove it.", parameter=name) from e
    return fingerprint(public)


def _server(folder: Path) -> Pair:
    path = folder / "server.json"
    if not path.exists():
        raise ConfigError(f"{folder} has no server's keys. Make them with the same command without --add or --revoke.")
    return Pair.of_secret(key_of(path, read(path), "secret"))


def _allowed(folder: Path, name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise ConfigError("use 1..64 letters, digits, '-', '_' or '.', the first a letter or digit", parameter=name)
    return folder / "allowed" / f"{name}.json"


def _place(path: Path, values: Dict[str, Any], move: Any) -> None:
    """Put a whole file in its place: a running server reads the folder twice a second. Raises OSError."""
    part = path.with_name(f".{path.name}.part")
    _write_new(part, values)
    try:
        move(str(part), str(path))
    finally:
        if part.exists():
            part.unlink()


def _write_new(path: Path, values: Dict[str, Any]) -> None:
    """Write a file that only this user reads. Raises FileExistsError, OSError."""
    with os.fdopen(os.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(values, file)
        file.flush()
        os.fsync(file.fileno())

"""The robot server's folder of keys, as `admission` reads it: made, a client admitted, a client revoked.

    server.json           the server's pair
    allowed/NAME.json     the public key of one client, and for an operator its role
    NAME.json             what a client proves, to be moved to its machine (`client.Keys`)

All files are 0600 in folders of 0700, and none is overwritten, but for "revoked" of a client.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Optional, Tuple

from serl_chunk_robot.errors import ConfigError
from serl_chunk_robot.safety.table import OPERATOR
from serl_chunk_robot.wire import curve


def make(folder: Path) -> str:
    """Make the server's keys; returns their fingerprint. Raises ConfigError, where there are some among others."""
    path, pair = folder / "server.json", curve.Pair.new()
    try:
        curve.make_folder(folder)
        curve.make_folder(folder / "allowed")
        curve.write(path, {"public": pair.public, "secret": pair.secret}, os.link)
    except FileExistsError as e:
        raise ConfigError(f"{path} exists already, and every client knows it. Admit a client with --add NAME.") from e
    except OSError as e:
        raise ConfigError(f"{folder} cannot hold keys: {e.strerror}. Give a folder of this user's.") from e
    return curve.fingerprint(pair.public)


def add(folder: Path, name: str, out: Optional[Path] = None, *, operator: bool = False) -> Tuple[Path, str]:
    """Admit a client under a name that is new.

    `out`: the client's own file; None: NAME.json next to the folder. Returns it, and the fingerprint of its key.

    Raises ConfigError: the folder has no server's keys, the name or the file is taken, or a file cannot be written.
    """
    server, own, allowed = curve.server_pair(folder, curve.NO_SERVER), curve.Pair.new(), curve.client_file(folder, name)
    if allowed.exists():
        raise ConfigError(f"{allowed} exists already. Choose another name, or remove that file first.", parameter=name)
    out = folder.resolve().parent / f"{name}.json" if out is None else out
    role = {"role": OPERATOR} if operator else {}
    try:
        curve.write(out, {"server": server.public, "secret": own.secret}, os.link)
    except FileExistsError as e:
        raise ConfigError(f"{out} exists already. Choose another file with --out FILE.", parameter=name) from e
    except OSError as e:
        raise ConfigError(
            f"{out} cannot be written: {e.strerror}. Choose another file with --out FILE.", parameter=name
        ) from e
    try:
        curve.write(allowed, {"public": own.public, **role}, os.link)
    except OSError as e:
        out.unlink()
        raise ConfigError(f"{allowed} cannot be written: {e.strerror}.", parameter=name) from e
    return out, curve.fingerprint(own.public)


def revoke(folder: Path, name: str) -> str:
    """Admit a client no longer; returns its key's fingerprint. Raises ConfigError."""
    curve.server_pair(folder, curve.NO_SERVER)
    path = curve.client_file(folder, name)
    if not path.exists():
        names = ", ".join(sorted(each.stem for each in path.parent.glob("[!.]*.json"))) or "none"
        raise ConfigError(f"no key of that name in {path.parent}. It has: {names}.", parameter=name)
    values = curve.read(path)
    public = curve.key_of(path, values, "public")
    try:
        curve.write(path, {**values, "revoked": True})
    except OSError as e:
        raise ConfigError(f"{path} cannot be written: {e.strerror}. Remove it.", parameter=name) from e
    return curve.fingerprint(public)

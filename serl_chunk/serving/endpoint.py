"""The WebSocket library, addresses of policy servers, and API keys: what both ends of a connection need."""

from __future__ import annotations

import hmac
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from serl_chunk.io import os_reason
from serl_chunk.types import ConfigError

DEFAULT_PORT = 8000
KEY_VARIABLE = "SERL_CHUNK_POLICY_KEY"
"""Environment variable with the path of an API key file, for clients."""
KEY_BYTES = 4096  # of a key file, at most
_KEY = re.compile(r"[\x21-\x7e]{16,512}")


def websockets() -> Any:
    """Return the package `websockets` with both of its ends. Raises ConfigError with the install hint."""
    try:
        import websockets
        import websockets.asyncio.server
        import websockets.exceptions
        import websockets.protocol
        import websockets.sync.client
    except ImportError as error:
        raise ConfigError(
            f"policy servers need websockets, which cannot be imported ({error}). Run: pip install 'serl-chunk[serve]'"
        ) from error
    return websockets


class Address(NamedTuple):
    """Where a policy server listens."""

    host: str
    port: int = DEFAULT_PORT

    @classmethod
    def parse(cls, text: str, parameter: str) -> Address:
        """Parse `openpi://HOST[:PORT]`, an IPv6 address in brackets. Raises ConfigError for `parameter`."""
        match = re.fullmatch(r"openpi://(\[[0-9a-fA-F:.]+\]|[\w.-]+)(?::(\d{1,5}))?/?", text)
        port = int(match[2] or DEFAULT_PORT) if match else 0
        if match is None or not 0 < port < 2**16:
            raise ConfigError(
                f"got {text!r}, expected openpi://HOST:PORT. Give the server's address, such as "
                f"openpi://127.0.0.1:{DEFAULT_PORT}",
                parameter=parameter,
            )
        return cls(match[1].strip("[]"), port)

    @property
    def url(self) -> str:
        return f"ws://{self.named}"

    @property
    def named(self) -> str:
        """`HOST:PORT`, as messages name it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def read_key(path: str, parameter: str) -> str:
    """Return the API key in a file: its only line. Raises ConfigError for `parameter`, without the key in it."""
    file = Path(path).expanduser()
    try:
        with file.open("rb") as opened:
            text = opened.read(KEY_BYTES + 1).decode("ascii", "replace").strip()
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read ({os_reason(error)}). Give a file with an API key", parameter=parameter
        ) from error
    if not _KEY.fullmatch(text):
        raise ConfigError(
            f"{file} holds no API key (expected one line of 16 to 512 ASCII characters without spaces). Make one: "
            f"python -c 'import secrets; print(secrets.token_urlsafe(32))' > {file}",
            parameter=parameter,
        )
    return text


def client_key(path: str, parameter: str) -> str:
    """Return the key in the file `path`, else in the one that the environment names; empty without either."""
    if path:
        return read_key(path, parameter)
    named = os.environ.get(KEY_VARIABLE, "")
    return read_key(named, KEY_VARIABLE) if named else ""


def authorization(key: str) -> dict[str, str]:
    """Return the header of a client with an API key; none for an empty one."""
    return {"Authorization": f"Api-Key {key}"} if key else {}


def is_authorized(header: str | None, key: str) -> bool:
    """Return whether a request's header holds `key`, compared in constant time. An empty key admits every request."""
    if not key:
        return True
    given = "" if header is None else header
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), authorization(key)["Authorization"].encode())

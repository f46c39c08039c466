"""The line that lets a robot PC join a learner: what is in it, and how it is written."""

from __future__ import annotations

import base64
import binascii
import hashlib
from typing import Any, NamedTuple

import msgpack
from zmq.utils import z85

from serl_chunk.types import ConfigError

_PREFIX = "sc1-"  # names the form; letters, digits, '-' and '_' survive every shell and chat
_CHECK_BYTES = 4
_MAX_CHARACTERS = 4096


class JoinToken(NamedTuple):
    """What a learner gives to one robot PC, once. It holds a secret."""

    server: str  # the learner's public key, Z85
    ticket: str  # secret half of the one-time pair, Z85
    name: str  # what the learner will call the robot PC
    port: int
    hosts: tuple[str, ...]  # where the learner may be found

    def __repr__(self) -> str:
        return f"Invitation(name={self.name!r}, hosts={self.hosts!r}, port={self.port})"

    def encode(self) -> str:
        """The line's one word."""
        keys = [z85.decode(key.encode()) for key in (self.server, self.ticket)]
        content: bytes = msgpack.packb([*keys, self.name, self.port, list(self.hosts)])
        return _PREFIX + base64.urlsafe_b64encode(_check(content) + content).decode().rstrip("=")

    @classmethod
    def decode(cls, word: str) -> JoinToken:
        """The invitation in a pasted word; raises ConfigError for one that is none, or not whole."""
        word = "".join(word.split())  # a line that a chat has wrapped
        if not word.startswith(_PREFIX) or len(word) > _MAX_CHARACTERS:
            raise ConfigError(f"that is no line of `serl-chunk keys add`: those begin with {_PREFIX!r}; copy all of it")
        try:
            text = word.removeprefix(_PREFIX)
            raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
            check, content = raw[:_CHECK_BYTES], raw[_CHECK_BYTES:]
            if check != _check(content):
                raise ValueError("its check sum is wrong")
            server, ticket, name, port, hosts = msgpack.unpackb(content)
            if not _valid(server, ticket, name, port, hosts):
                raise ValueError("its fields are wrong")
        except (ValueError, TypeError, binascii.Error, msgpack.UnpackException) as e:
            raise ConfigError("the line is not complete, or was changed on its way: copy all of it once more") from e
        return cls(z85.encode(server).decode(), z85.encode(ticket).decode(), name, port, tuple(hosts))


def _check(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()[:_CHECK_BYTES]


def _valid(server: Any, ticket: Any, name: Any, port: Any, hosts: Any) -> bool:
    keys = all(isinstance(k, bytes) and len(k) == 32 for k in (server, ticket))
    texts = isinstance(hosts, list) and all(isinstance(t, str) for t in [name, *hosts])
    return keys and texts and isinstance(port, int) and 0 < port < 65536

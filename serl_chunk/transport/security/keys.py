"""Keys: the machines that a learner admits, and the learner that a robot PC trusts.

`docs/architecture/transport.md` describes joining, the protection and its limits. Files, all 0600 in folders of mode
0700; those that others can read are refused:

    server.json           the learner's pair
    allowed/NAME.json     at the learner: a robot's public key, or a one-time public key and until when it is valid
    learners/PRINT.json   at the robot: the learner's public key, this machine's pair, where the learner was
    fleets/NAME/          at the learner: the key folder of all machines of a fleet
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import dataclasses
import fcntl
import fnmatch
import hashlib
import os
import re
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

from serl_chunk.transport.wire.handshake import DEFAULT_PORT
from serl_chunk.types import ConfigError
from serl_chunk_robot.wire import curve
from serl_chunk_robot.wire.curve import Pair, damaged, default_folder, fingerprint, key_of, read, to_bytes, to_text

THIS_MACHINE = "this-machine"  # name of the key that the learner's own machine has
_PREFIX = "sc1-"  # names the form of a join token; letters, digits, '-' and '_' survive every shell and chat
_CHECK_BYTES = 4
_MAX_CHARACTERS = 4096


def add_line(folder: Path, port: int, name: str = "NAME") -> str:
    """Return the command that invites a robot PC to a learner with the keys in `folder` at `port`."""
    where = "" if folder == default_folder() else f" --keys {folder}"
    return f"serl-chunk keys add {name}{where}" + ("" if port == DEFAULT_PORT else f" --port {port}")


class JoinToken(NamedTuple):
    """An invitation of one robot PC. It holds a secret, which its `repr` leaves out."""

    server: str  # the learner's public key, Z85
    ticket: str  # secret half of the one-time pair, Z85
    name: str  # what the learner will call the robot PC
    port: int
    hosts: tuple[str, ...]  # where the learner may be found

    def __repr__(self) -> str:
        return f"JoinToken(name={self.name!r}, hosts={self.hosts!r}, port={self.port})"

    def encode(self) -> str:
        values = to_bytes(self.server), to_bytes(self.ticket), self.name, self.port, self.hosts
        content: bytes = msgpack.packb(values)
        return _PREFIX + base64.urlsafe_b64encode(_check(content) + content).decode().rstrip("=")

    @classmethod
    def decode(cls, word: str) -> JoinToken:
        """Return the token in a pasted word. Raises ConfigError for one that is none, or not whole."""
        word = "".join(word.split())  # a line that a chat has wrapped
        if not word.startswith(_PREFIX) or len(word) > _MAX_CHARACTERS:
            raise ConfigError(
                f"the line does not begin with {_PREFIX!r}, as lines of `serl-chunk keys add` do. Copy the whole line"
            )
        try:
            text = word.removeprefix(_PREFIX)
            raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
            check, content = raw[:_CHECK_BYTES], raw[_CHECK_BYTES:]
            if check != _check(content):
                raise ValueError("checksum")
            server, ticket, name, port, hosts = msgpack.unpackb(content)
            keys_fit = all(isinstance(k, bytes) and len(k) == 32 for k in (server, ticket))
            texts_fit = isinstance(hosts, list) and all(isinstance(t, str) for t in [name, *hosts])
            if not (keys_fit and texts_fit and isinstance(port, int) and 0 < port < 65536):
                raise ValueError("fields")
        except (ValueError, TypeError, binascii.Error, msgpack.UnpackException) as e:
            raise ConfigError("the line is not complete, or was changed on its way. Copy the whole line again") from e
        return cls(to_text(server), to_text(ticket), name, port, tuple(hosts))


def _check(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()[:_CHECK_BYTES]


@dataclasses.dataclass(frozen=True)
class ClientKeys:
    """The keys of a robot PC for one learner."""

    folder: Path
    name: str  # what the learner calls this machine
    server: str  # the learner's public key
    pair: Pair
    ticket: Pair | None  # one-time pair; None once this machine has joined
    line: str  # fingerprint of the one-time key it joined with, or is to
    hosts: tuple[str, ...]  # where the learner was
    port: int  # 0 for unknown
    joined: float  # unix seconds
    actors: str = ""  # of a fleet's key: the pattern of its actors' ids
    # The folder was given: an actor sends nothing without these keys. Otherwise a learner on loopback decides.
    binding: bool = dataclasses.field(default=False, compare=False)

    @classmethod
    def accept(cls, folder: Path, token: JoinToken) -> ClientKeys:
        """Make a pair of this machine, for the learner that invites it. Nothing is saved. Raises ConfigError."""
        ticket, now = Pair.of_secret(token.ticket), time.time()
        line = fingerprint(ticket.public)
        return cls(folder, token.name, token.server, Pair.new(), ticket, line, token.hosts, token.port, now)

    @classmethod
    def all(cls, folder: Path) -> list[ClientKeys]:
        """Return the keys of every learner that was joined from here, the newest last. Raises ConfigError."""
        found = []
        for path in sorted((folder / "learners").glob("[!.]*.json")):
            value = read(path)
            ticket = Pair.of_secret(key_of(path, value, "ticket")) if value.get("ticket") else None
            try:
                name, line, hosts = str(value["name"]), str(value["line"]), tuple(str(h) for h in value["hosts"])
                port, joined = int(value["port"]), float(value["joined"])
            except (KeyError, TypeError, ValueError):
                raise damaged(path, "its name, hosts, port or time") from None
            pair, actors = Pair.of_secret(key_of(path, value, "secret")), str(value.get("actors", ""))
            server = key_of(path, value, "server")
            found.append(cls(folder, name, server, pair, ticket, line, hosts, port, joined, actors))
        return sorted(found, key=lambda k: k.joined)

    @classmethod
    def find(cls, folder: Path, host: str) -> ClientKeys | None:
        """Return the keys of the learner that was at `host`, else the newest; None for none. Raises ConfigError."""
        known = cls.all(folder)
        if not known:
            return None
        names = {host}
        with contextlib.suppress(OSError, UnicodeError):
            names |= {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
        return ([k for k in known if names.intersection(k.hosts)] or known)[-1]

    @property
    def file(self) -> Path:
        return self.folder / "learners" / f"{fingerprint(self.server)}.json"

    def discard(self) -> None:
        self.file.unlink(missing_ok=True)

    def save(self) -> None:
        """Write the keys, in place of older ones for the same learner. Raises ConfigError."""
        value = {
            "name": self.name, "server": self.server, "public": self.pair.public, "secret": self.pair.secret,
            "ticket": self.ticket.secret if self.ticket else None, "line": self.line, "hosts": self.hosts,
            "port": self.port, "joined": self.joined, "actors": self.actors,
        }  # fmt: skip
        write(self.file, value)

    def at(self, hosts: Sequence[str], *, joined: bool = False) -> ClientKeys:
        """Return these keys with more addresses, without the one-time key if `joined`; saved. Raises ConfigError."""
        ticket = None if joined else self.ticket
        keys = dataclasses.replace(self, ticket=ticket, hosts=tuple(dict.fromkeys((*self.hosts, *hosts))))
        if keys != self:
            keys.save()
        return keys


def check_pattern(actors: str) -> None:
    """Raise ConfigError for what cannot be the pattern of a fleet's actor ids."""
    if not re.fullmatch(r"[\w-][\w.-]*\*[\w.-]*", actors):
        valid = "letters, digits, '_', '-', '.' and one '*' behind them, as in 'sim-*'"
        raise ConfigError(f"got {actors!r}, expected {valid}", parameter="actors")


def not_of_fleet(actors: str, actor_id: str) -> bool:
    """Return whether a key for `actors` admits no actor of this id; a key without a pattern admits every id."""
    return bool(actors) and not fnmatch.fnmatchcase(actor_id, actors)


def write(path: Path, value: dict[str, Any]) -> None:
    """Write a file of keys, and its folder where that is not there. Raises ConfigError."""
    try:
        curve.make_folder(path.parent)
        curve.write(path, value)
    except OSError as e:
        raise ConfigError(f"{path} cannot be written: {e.strerror}") from e


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Let one process at a time change the folder."""
    with contextlib.ExitStack() as stack:
        try:
            curve.make_folder(folder)
            lock = os.open(folder / ".lock", os.O_WRONLY | os.O_CREAT, 0o600)
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as e:
            raise ConfigError(f"the key folder {folder} cannot be used: {e.strerror}") from e
        yield

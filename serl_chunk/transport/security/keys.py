"""Keys: whom a learner lets in, and which learner a robot PC talks to.

Every learner that other machines can reach has a CURVE key pair (Curve25519, ZeroMQ's own protocol), and so has every
robot PC. The robot PC must hold the learner's public key and the learner the robot's, otherwise no connection comes
about; the three sockets then carry nothing but authenticated, encrypted messages, under keys made for one connection.

**Joining.** A learner never sees a robot's secret and a robot's secret never travels. `serl-chunk keys add NAME` (and
the first learner that listens on a network) prints one line with the learner's public key and a *one-time* pair. The
robot PC makes a pair of its own, connects with the one-time key and hands its public key over, encrypted; the learner
writes it down under NAME and forgets the one-time key. That is done by `keys join` where the learner can be reached,
and by the actor's first connection where it cannot. The one-time key opens nothing but this exchange, once, within ten
minutes by the learner's clock. The file is replaced before the answer is sent, so an answer that is lost costs nothing:
the robot's own key is known then.

**What this protects from.** An attacker who reaches the ports, or listens to or changes what passes, without a key:
cannot read, feed, impersonate the learner or replay. An old line (in a shell's history, a chat) is worth nothing. A
revoked key is refused, and a session that uses it is cut within a second or so.

**What it does not.** An attacker who reads the line before the robot has used it can join instead of it: the robot's
own `keys join` then fails and says so, and `keys list` shows the stranger. While a command runs, its line is in the
list of processes. An allowed robot is trusted: it may send records under any actor id, and fetch the policy; keys say
who may come in, not who may do what. A user who can read these files, or is root on either machine, has the keys. An
attacker who reaches a port can make it work on handshakes, and an open connection of a revoked key stays open, unheard,
until its owner closes it. On loopback there are no keys unless `--keys` asks for them, at the learner or at the actor:
other users of the machine are trusted. Where an actor was given `--keys` it says nothing to a learner without keys, on
loopback too, for that may be the near end of a tunnel.

Files, all 0600 in folders of mode 0700, none of them readable by others or they are refused:

    server.json           the learner's pair
    allowed/NAME.json     at the learner: a robot's public key, or a one-time public key and until when it is valid
    learners/PRINT.json   at the robot: the learner's public key, this machine's pair, where the learner was
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import re
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import zmq
from zmq.utils import z85

from serl_chunk.transport.security.join_token import JoinToken
from serl_chunk.transport.security.key_files import check_folder, damaged, key_of, locked, read, write
from serl_chunk.transport.sockets import DEFAULT_PORT
from serl_chunk.types import ConfigError

VALID_SECONDS = 600.0  # of a one-time key
THIS_MACHINE = "this-machine"  # name of the key that the learner's own machine has
LOOPBACK = ("127.0.0.1", "::1", "localhost")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


def default_folder() -> Path:
    """`$XDG_CONFIG_HOME/serl-chunk/keys`, or `~/.config/serl-chunk/keys`."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~")) / ".config"
    return root / "serl-chunk" / "keys"


def add_line(folder: Path, port: int, name: str = "NAME") -> str:
    """The command that invites a robot PC to a learner with the keys in `folder` at `port`."""
    where = "" if folder == default_folder() else f" --keys {folder}"
    return f"serl-chunk keys add {name}{where}" + ("" if port == DEFAULT_PORT else f" --port {port}")


def fingerprint(public: str) -> str:
    """Twelve hexadecimal digits that stand for a public key in messages."""
    return hashlib.sha256(public.encode()).hexdigest()[:12]


@dataclasses.dataclass(frozen=True)
class Pair:
    """A key pair, both halves as 40 characters of Z85. The secret is in no `repr`."""

    public: str
    secret: str = dataclasses.field(repr=False)

    @classmethod
    def new(cls) -> Pair:
        """A fresh random pair."""
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())

    @classmethod
    def of_secret(cls, secret: str) -> Pair:
        """The pair that a secret half belongs to."""
        return cls(zmq.curve_public(secret.encode()).decode(), secret)


@dataclasses.dataclass(frozen=True)
class Client:
    """What a learner has written down about one name."""

    name: str
    public: str | None  # the robot's key, once it has joined
    ticket: str | None  # one-time public key
    until: float  # unix seconds up to which the one-time key is valid
    since: float  # unix seconds of the last change
    revoked: bool

    def state(self, now: float) -> Literal["joined", "invited", "expired", "revoked"]:
        """`joined`: may connect. `invited`: may join. The other two may nothing."""
        if self.revoked:
            return "revoked"
        if self.public is not None:
            return "joined"
        # Much later than the longest validity: the clock was set back since, and the true time is unknown.
        return "invited" if now <= self.until <= now + VALID_SECONDS + 1 else "expired"


class ServerKeys:
    """The learner's half of a key folder. Methods may be called from any thread and any process."""

    def __init__(self, folder: Path, pair: Pair, clock: Callable[[], float]) -> None:
        self.folder, self.pair = folder, pair
        self._clock = clock
        self._seen: tuple[list[tuple[str, int, int]], list[Client]] | None = None

    @classmethod
    def open(cls, folder: Path, clock: Callable[[], float] = time.time) -> ServerKeys:
        """The keys in `folder`; raises ConfigError where there are none, or others can read them."""
        path = folder / "server.json"
        if not path.exists():
            raise ConfigError(f"{folder} holds no learner's keys: `serl-chunk keys init` makes them on its machine")
        keys = cls(folder, Pair.of_secret(key_of(path, read(path), "secret")), clock)
        keys.clients()
        return keys

    @classmethod
    def ensure(cls, folder: Path, clock: Callable[[], float] = time.time) -> tuple[ServerKeys, bool]:
        """The keys in `folder`, and whether they were made just now. Raises ConfigError.

        New keys come with one for this machine, so that actors and evaluations here need not join.
        """
        with locked(folder):
            if (folder / "server.json").exists():
                return cls.open(folder, clock), False
            with contextlib.suppress(FileNotFoundError):  # of keys that are gone: none of theirs can connect any more
                (folder / "allowed").rename(folder / f"allowed.{clock():.0f}")
            keys, own = cls(folder, Pair.new(), clock), Pair.new()
            keys._write(Client(THIS_MACHINE, own.public, None, 0.0, clock(), False))
            hosts = (*LOOPBACK, socket.gethostname())
            ClientKeys(folder, THIS_MACHINE, keys.pair.public, own, None, "", hosts, 0, clock()).save()
            write(folder / "server.json", {"public": keys.pair.public, "secret": keys.pair.secret})  # last: all there
            return keys, True

    def clients(self) -> list[Client]:
        """All clients on file, by name; read again where a file has changed. Raises ConfigError."""
        folder = self.folder / "allowed"
        try:
            for f in (self.folder, folder):
                check_folder(f)
            entries = sorted(filter(None, map(_stamp, os.scandir(folder))))
        except FileNotFoundError as e:
            if not (self.folder / "server.json").exists():  # unmounted, or moved: that revokes no key
                raise ConfigError(f"{self.folder} is gone") from e
            entries = []
        except OSError as e:
            raise ConfigError(f"{folder} cannot be read: {e.strerror}") from e
        seen = self._seen
        if seen is None or seen[0] != entries:
            seen = self._seen = entries, [self._client(folder / name) for name, *_ in entries]
        return seen[1]

    def known(self, public: str) -> Client | None:
        """Whose key or one-time key this is; None for neither. Raises ConfigError."""
        return next((c for c in self.clients() if public in (c.public, c.ticket)), None)

    def may_connect(self, public: str) -> bool:
        """Whether this is the key of a robot that has joined and was not revoked. Raises ConfigError."""
        client = self.known(public)
        return client is not None and client.public == public and client.state(self._clock()) == "joined"

    def may_join(self, ticket: str) -> Client | None:
        """The client that may join with this one-time key now, or None. Raises ConfigError."""
        client = self.known(ticket)
        invited = client is not None and client.ticket == ticket and client.state(self._clock()) == "invited"
        return client if invited else None

    def invite(self, name: str, hosts: Sequence[str], port: int) -> JoinToken:
        """A one-time key for `name`, in place of an older one that was not used.

        Args:
            hosts, port: where a robot will find the learner, as far as that is known here.

        Raises ConfigError for a name that has joined already, or cannot be one.
        """
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{name!r} cannot be a key's name: use 1..64 letters, digits, '-', '_' or '.'")
        ticket = Pair.new()
        with locked(self.folder):
            old = next((c for c in self.clients() if c.name == name), None)
            if old is not None and old.state(self._clock()) == "joined":
                raise ConfigError(
                    f"{name!r} has joined already: choose another name, or `serl-chunk keys revoke {name}` before"
                )
            now = self._clock()
            self._write(Client(name, None, ticket.public, now + VALID_SECONDS, now, False))
        return JoinToken(self.pair.public, ticket.secret, name, port, tuple(hosts))

    def enrol(self, ticket: str, public: str) -> str | None:
        """Write `public` down for good in place of a one-time key; its name, or None where that is not valid.

        Raises ConfigError.
        """
        with locked(self.folder):
            client = self.may_join(ticket)
            if client is None or self.known(public) is not None:  # another's key: revoking one would revoke both
                return None
            self._write(Client(client.name, public, None, 0.0, self._clock(), False))
            return client.name

    def revoke(self, name: str) -> Client:
        """Let `name` in no more; returns what it was. A running learner notices. Raises ConfigError."""
        with locked(self.folder):
            client = next((c for c in self.clients() if c.name == name), None)
            if client is None:
                names = ", ".join(c.name for c in self.clients()) or "none"
                raise ConfigError(f"{self.folder} has no key named {name!r}; it has: {names}")
            self._write(dataclasses.replace(client, ticket=None, revoked=True, since=self._clock()))
            return client

    def _client(self, path: Path) -> Client:
        value = read(path)
        public, ticket = (value.get(k) and key_of(path, value, k) for k in ("public", "ticket"))
        try:
            until, since = float(value["until"]), float(value["since"])
        except (KeyError, TypeError, ValueError):
            raise damaged(path, "its times") from None
        # Not bool(): whatever is no plain "no" must not let a client in.
        return Client(path.stem, public or None, ticket or None, until, since, value.get("revoked") is not False)

    def _write(self, client: Client) -> None:
        value = dataclasses.asdict(client)
        del value["name"]
        write(self.folder / "allowed" / f"{client.name}.json", value)
        self._seen = None


@dataclasses.dataclass(frozen=True)
class ClientKeys:
    """What a robot PC needs to talk to one learner."""

    folder: Path
    name: str  # what the learner calls this machine
    server: str  # the learner's public key
    pair: Pair
    ticket: Pair | None  # one-time pair; None once this machine has joined
    line: str  # fingerprint of the one-time key it joined with, or is to
    hosts: tuple[str, ...]  # where the learner was
    port: int  # 0 for unknown
    joined: float  # unix seconds
    # The folder was given: an actor sends nothing without these keys. Otherwise a learner on loopback decides.
    binding: bool = dataclasses.field(default=False, compare=False)

    @classmethod
    def accept(cls, folder: Path, invitation: JoinToken) -> ClientKeys:
        """A new pair of this machine, for the learner that invites it; not saved. Raises ConfigError."""
        ticket = Pair.of_secret(invitation.ticket)
        return cls(
            folder,
            invitation.name,
            invitation.server,
            Pair.new(),
            ticket,
            fingerprint(ticket.public),
            invitation.hosts,
            invitation.port,
            time.time(),
        )

    @classmethod
    def all(cls, folder: Path) -> list[ClientKeys]:
        """One for every learner that was joined from here, the newest last. Raises ConfigError."""
        found = []
        for path in sorted((folder / "learners").glob("*.json")):
            value = read(path)
            ticket = Pair.of_secret(key_of(path, value, "ticket")) if value.get("ticket") else None
            try:
                name, line, hosts = str(value["name"]), str(value["line"]), tuple(str(h) for h in value["hosts"])
                port, joined = int(value["port"]), float(value["joined"])
            except (KeyError, TypeError, ValueError):
                raise damaged(path, "its name, hosts, port or time") from None
            pair = Pair.of_secret(key_of(path, value, "secret"))
            found.append(cls(folder, name, key_of(path, value, "server"), pair, ticket, line, hosts, port, joined))
        return sorted(found, key=lambda k: k.joined)

    @classmethod
    def find(cls, folder: Path, host: str) -> ClientKeys | None:
        """The keys for the learner at `host`: those joined from there, else the newest; None where there are none.

        Raises ConfigError.
        """
        known = cls.all(folder)
        if not known:
            return None
        names = {host}
        with contextlib.suppress(OSError, UnicodeError):
            names |= {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
        return ([k for k in known if names.intersection(k.hosts)] or known)[-1]

    @property
    def file(self) -> Path:
        """Where they are kept."""
        return self.folder / "learners" / f"{fingerprint(self.server)}.json"

    def discard(self) -> None:
        """Remove the file of keys that turned out to be worth nothing."""
        self.file.unlink(missing_ok=True)

    def save(self) -> None:
        """Write them, in place of older ones for the same learner. Raises ConfigError."""
        value = {
            "name": self.name, "server": self.server, "public": self.pair.public, "secret": self.pair.secret,
            "ticket": self.ticket.secret if self.ticket else None, "line": self.line, "hosts": self.hosts,
            "port": self.port, "joined": self.joined,
        }  # fmt: skip
        write(self.file, value)

    def at(self, hosts: Sequence[str]) -> ClientKeys:
        """These keys, known to be for a learner at `hosts` too; saved where that is new. Raises ConfigError."""
        keys = dataclasses.replace(self, hosts=tuple(dict.fromkeys((*self.hosts, *hosts))))
        if keys.hosts != self.hosts:
            keys.save()
        return keys

    def enrolled(self, host: str) -> ClientKeys:
        """These keys after the learner at `host` has written them down; saved. Raises ConfigError."""
        hosts = self.hosts if host in self.hosts else (*self.hosts, host)
        keys = dataclasses.replace(self, ticket=None, hosts=hosts)
        keys.save()
        return keys


def to_text(key: bytes) -> str:
    """32 bytes as Z85."""
    return z85.encode(key).decode()


def to_bytes(key: str) -> bytes:
    """Z85 as 32 bytes."""
    return z85.decode(key.encode())


def _stamp(entry: os.DirEntry[str]) -> tuple[str, int, int] | None:
    """What changes with a file's content; None for what is no client's, or was removed at this moment."""
    with contextlib.suppress(FileNotFoundError):
        return (entry.name, entry.inode(), entry.stat().st_mtime_ns) if _is_client(entry.name) else None
    return None


def _is_client(name: str) -> bool:
    return name.endswith(".json") and _NAME.fullmatch(name.removesuffix(".json")) is not None

"""The learner's side of the keys: the folder of allowed keys, and the answers to libzmq's requests about them (ZAP).

The server's control thread answers. libzmq names the key in every message of a connection ("User-Id").
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import zmq

from serl_chunk.transport.security.keys import (
    THIS_MACHINE,
    ClientKeys,
    JoinToken,
    add_line,
    check_pattern,
    locked,
    not_of_fleet,
    write,
)
from serl_chunk.transport.server.sessions import RefuseError
from serl_chunk.transport.wire import handshake
from serl_chunk.transport.wire.handshake import Counters
from serl_chunk.types import ConfigError
from serl_chunk_robot.wire import codec, curve
from serl_chunk_robot.wire.codec import Frame, Message, WireError
from serl_chunk_robot.wire.curve import (
    NAME,
    Pair,
    check_folder,
    client_file,
    damaged,
    fingerprint,
    key_of,
    read,
    require_keys,
    server_pair,
    to_text,
)

logger = logging.getLogger(__name__)

VALID_SECONDS = 600.0  # of a one-time key
LOOPBACK = ("127.0.0.1", "::1", "localhost")
_ENDPOINT = "inproc://zeromq.zap.01"  # fixed by ZeroMQ's RFC 27
_WITHOUT_TOKEN = (handshake.WHO, handshake.HELLO, handshake.INSPECT, handshake.ECHO, handshake.ACTORS)
_TO_JOIN = "this key is for joining only. Run `serl-chunk keys join` with the line that contained it"


@dataclasses.dataclass(frozen=True)
class Client:
    """The learner's entry for one name."""

    name: str
    public: str | None  # the robot's key, once it has joined
    ticket: str | None  # one-time public key
    until: float  # unix seconds up to which the one-time key is valid
    since: float  # unix seconds of the last change
    revoked: bool
    actors: str = ""  # pattern of the ids that actors with this key may have; empty: every id

    def state(self, now: float) -> Literal["joined", "invited", "expired", "revoked"]:
        """Return `joined` (may connect), `invited` (may join), `expired` or `revoked` (may nothing)."""
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
        """Return the keys in `folder`. Raises ConfigError where there are none, or others can read them."""
        missing = "holds no learner's keys. Make them on its machine: `serl-chunk keys init`"
        keys = cls(folder, server_pair(folder, missing), clock)
        keys.clients()
        return keys

    @classmethod
    def ensure(cls, folder: Path, clock: Callable[[], float] = time.time) -> tuple[ServerKeys, bool]:
        """Return the keys in `folder`, and whether they were made now, with one of this machine. Raises ConfigError."""
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
        """Return all clients by name; files are read again where one has changed. Raises ConfigError."""
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

    def role(self, public: str) -> tuple[Client | None, Literal["connect", "join", ""]]:
        """Return the client with this key or one-time key and what it may do; "" for nothing. Raises ConfigError."""
        client = next((c for c in self.clients() if public in (c.public, c.ticket)), None)
        state = "" if client is None else client.state(self._clock())
        if client is not None and state == "joined" and client.public == public:
            return client, "connect"
        return client, "join" if state == "invited" else ""

    def invite(self, name: str, hosts: Sequence[str], port: int) -> JoinToken:
        """Make a one-time key for `name`, in place of an unused one. `hosts`, `port`: of the learner.

        Raises ConfigError for a name that has joined already, or cannot be one.
        """
        ticket, now = Pair.new(), self._clock()
        self._add(Client(name, None, ticket.public, now + VALID_SECONDS, now, False))
        return JoinToken(self.pair.public, ticket.secret, name, port, tuple(hosts))

    def add_fleet(self, name: str, actors: str, hosts: Sequence[str], port: int) -> ClientKeys:
        """Make one key for all machines of a fleet, in a key folder of its own, and admit it. Raises ConfigError.

        Args:
            actors: pattern of the ids that its actors may have.
        """
        check_pattern(actors)
        pair, now = Pair.new(), self._clock()
        self._add(Client(name, pair.public, None, 0.0, now, False, actors))
        folder = self.folder / "fleets" / name
        curve.make_folder(folder)
        keys = ClientKeys(folder, name, self.pair.public, pair, None, "", tuple(hosts), port, now, actors)
        keys.save()
        return keys

    def _add(self, client: Client) -> None:
        client_file(self.folder, client.name)
        with locked(self.folder):
            known = self.clients()
            old = next((c for c in known if c.name == client.name), None)
            if old is not None and old.state(self._clock()) == "joined":
                revoke = f"serl-chunk keys revoke {client.name}"
                raise ConfigError(f"{client.name!r} has joined already. Choose another name, or run `{revoke}` first")
            for other in known:
                both = (client.actors, other.name), (other.actors, client.name)
                shared = any(pattern and not not_of_fleet(pattern, name) for pattern, name in both)
                if shared and other != old and other.state(self._clock()) in ("joined", "invited"):
                    text = f"{client.name!r} and {other.name!r}: actors of a fleet's key may have the other's name"
                    raise ConfigError(f"{text}. Choose another name or pattern, or revoke {other.name!r} first")
            self._write(client)

    def enrol(self, ticket: str, public: str) -> str | None:
        """Write `public` in place of a one-time key; its name, or None where that is not valid. Raises ConfigError."""
        with locked(self.folder):
            client, role = self.role(ticket)
            if client is None or role != "join" or self.role(public)[0] is not None:
                return None  # another's key, among others: revoking one would revoke both
            self._write(Client(client.name, public, None, 0.0, self._clock(), False))
            return client.name

    def revoke(self, name: str) -> Client:
        """Refuse `name` from now on; returns its entry before. A running learner notices. Raises ConfigError."""
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
        # Not bool(): only a plain false admits a client.
        revoked, actors = value.get("revoked") is not False, str(value.get("actors", ""))
        return Client(path.stem, public or None, ticket or None, until, since, revoked, actors)

    def _write(self, client: Client) -> None:
        value = dataclasses.asdict(client)
        del value["name"]
        write(client_file(self.folder, client.name), value)
        self._seen = None


def _stamp(entry: os.DirEntry[str]) -> tuple[str, int, int] | None:
    """Return what changes with a file's content; None for no client's file, and one that was just removed."""
    if not entry.name.endswith(".json") or not NAME.fullmatch(entry.name.removesuffix(".json")):
        return None
    with contextlib.suppress(FileNotFoundError):
        return entry.name, entry.inode(), entry.stat().st_mtime_ns
    return None


class Authenticator:
    """Admits the keys of a folder. Make it before the first of the context's sockets is bound."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        keys: ServerKeys,
        counters: Counters,
        complain: Callable[[str, str, str], None],
        port: int,
    ) -> None:
        self._keys, self._counters, self._complain, self._port = keys, counters, complain, port
        self._failed = ""  # why the key folder could not be read last
        self.socket = context.socket(zmq.ROUTER)  # to poll for reading
        self.socket.linger = 0
        self.socket.bind(_ENDPOINT)

    def secure(self, s: zmq.Socket[bytes]) -> None:
        """Make a socket require a key. Call it before the socket is bound."""
        require_keys(s, self._keys.pair)

    def serve(self) -> None:
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            _, _, _, request, _, address, _, mechanism, *credentials = frames
            public = to_text(credentials[0]) if mechanism == b"CURVE" and credentials else ""
            status = self._judge(public, address.decode(errors="replace"))
            user = public.encode() if status == b"200" else b""
            self.socket.send_multipart([*frames[:3], request, status, b"", user, b""])

    def _judge(self, public: str, address: str) -> bytes:
        """Return the status of a key: 200 admitted, 400 refused, 500 unknown now."""
        client, role = self._role(public)
        if role != "":
            return b"500" if role is None else b"200"
        self._counters["keys_refused"] += 1
        line = add_line(self._keys.folder, self._port, client.name if client else "NAME")
        if client is None:
            what = f"unknown key: {fingerprint(public)}. If this is a robot of yours, run `{line}` here"
        else:
            expired = f"expired line of {client.name}: `{line}` prints another"
            what = f"revoked key of {client.name}: it is not admitted" if client.revoked else expired
        self._complain("control", address.removeprefix("::ffff:"), what)
        return b"400"

    def _role(self, public: str) -> tuple[Client | None, Literal["connect", "join", "", None]]:  # None: unknown now
        try:
            found = self._keys.role(public)
        except ConfigError as e:
            self._cannot(e)
            return None, None
        self._failed = ""
        return found

    def _cannot(self, error: ConfigError) -> None:
        if str(error) != self._failed:
            self._failed = str(error)
            logger.error("keys cannot be checked, so no new peer is admitted: %s", error)

    def gone(self, public: str) -> bool:
        """Return whether a key that was admitted would not be now. An unreadable folder revokes nothing."""
        return self._role(public)[1] in ("", "join")

    def name_of(self, public: str) -> str:
        client, _ = self._role(public)
        return "?" if client is None else client.name

    def misnamed(self, public: str, actor_id: str) -> str:
        """Return why an actor with this key may not have this id; empty where it may. Raises RefuseError: unknown."""
        client, role = self._role(public)
        if role is None:
            raise RefuseError("the learner cannot read its key folder now", retry=True)
        if client is None or not not_of_fleet(client.actors, actor_id):
            return ""
        return f"the key {client.name!r} admits actors {client.actors!r}, got {actor_id!r}. Give another --actor_id"

    def revoked(self, public: str) -> str:
        return (
            f"the key {self.name_of(public)!r} ({fingerprint(public)}) of this machine was revoked. If that was a "
            "mistake, run `serl-chunk keys add NAME` on the learner's machine, and paste the line it prints here"
        )

    def answer(self, message: Message, public: str, peer: str) -> list[Frame] | None:
        """Answer a control message about keys, or one that this key may not send; None for others. Raises WireError."""
        if message.kind == handshake.ENROL:
            return self._enrol(message, public, peer)
        if message.kind in _WITHOUT_TOKEN and self.gone(public):  # other messages need a session's token
            joins = self._role(public)[1] == "join"
            return handshake.refusal(_TO_JOIN if joins else self.revoked(public))
        return None

    def _enrol(self, message: Message, ticket: str, peer: str) -> list[Frame]:
        key = codec.field(message.header, "public", bytes)
        if len(key) != 32:
            raise WireError("a public key has 32 bytes")
        public = to_text(key)
        try:
            name = self._keys.enrol(ticket, public)
        except ConfigError as e:
            self._cannot(e)
            return handshake.refusal(f"the learner cannot write its key folder now: {e}", retry=True)
        if name is None:
            return handshake.refusal(
                "that line was used already, or is older than ten minutes. Print another on the learner's machine: "
                "`serl-chunk keys add NAME`"
            )
        logger.info("%s joined from %s with the key %s", name, peer, fingerprint(public))
        return codec.encode(handshake.ENROLLED, {"name": name})


def user_of(frames: list[Any]) -> str:
    """Return the public key of a received message; empty where its socket requires none."""
    try:
        return str(frames[-1].get("User-Id")) if frames else ""
    except zmq.ZMQError:
        return ""

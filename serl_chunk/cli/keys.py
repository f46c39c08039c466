"""`serl-chunk keys`, and the keys of a learner or an actor (threat model: `docs/architecture/transport.md`)."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from serl_chunk.config.fields import require
from serl_chunk.config.transport import TransportConfig
from serl_chunk.io import Waiting
from serl_chunk.transport.security.client import UnencryptedPeerError, enroll
from serl_chunk.transport.security.keys import THIS_MACHINE, ClientKeys, JoinToken, add_line, not_of_fleet
from serl_chunk.transport.security.server import ServerKeys
from serl_chunk.transport.wire.handshake import (
    DEFAULT_PORT,
    RefusedError,
    UnreachableError,
    check_port,
    read_address,
)
from serl_chunk.types import ConfigError
from serl_chunk_robot.wire.curve import default_folder, fingerprint
from serl_chunk_robot.wire.sockets import is_loopback

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
DEFAULT_ACTOR = "actor"  # id of an actor without keys, unless the operator chooses one
FIRST_ROBOT = "robot"  # name of the first robot PC unless the operator chooses one
INDICES = ("SLURM_ARRAY_TASK_ID", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "RANK")  # the first that is set counts
JOIN_TIMEOUT = 3.0  # seconds for each address of a learner that is tried


def init_flags(p: argparse.ArgumentParser) -> None:
    """Add the flag of every command of keys."""
    p.add_argument("--keys", metavar="DIR", help="the key folder (default: ~/.config/serl-chunk/keys)")


list_flags = init_flags


def add_flags(p: argparse.ArgumentParser) -> None:
    """Add the flags of `add`."""
    init_flags(p)
    p.add_argument("name", metavar="NAME", nargs="?", help="what to call the robot PC")
    p.add_argument("--fleet", metavar="NAME", help="one key for many machines, which need no line, and its name")
    p.add_argument("--actors", metavar="PATTERN", help="ids of that fleet's actors (default: 'NAME-*')")
    p.add_argument("--host", help="where the robot PC finds the learner (default: this machine's address)")
    p.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help="port of the learner, as actors reach it (default: 5588)"
    )


def join_flags(p: argparse.ArgumentParser) -> None:
    """Add the flags of `join`."""
    init_flags(p)
    p.add_argument("line", metavar="LINE", help="the line's last word; valid once, for ten minutes")
    p.add_argument("--ip", help="where the learner is, if not at the line's address")


def revoke_flags(p: argparse.ArgumentParser) -> None:
    """Add the flags of `revoke`."""
    init_flags(p)
    p.add_argument("name", metavar="NAME", help="one that `serl-chunk keys list` names")


def key_folder(folder: str | None) -> Path:
    """Return `--keys DIR`, or the default folder."""
    return default_folder() if folder is None else Path(folder).expanduser()


def learner_keys(bind: str, folder: str | None, *, insecure: bool) -> ServerKeys | None:
    """Return the keys of a learner that listens on `bind`, made if absent; None if it needs none; ConfigError."""
    if insecure or (folder is None and is_loopback(bind)):
        return None
    try:
        keys, new = ServerKeys.ensure(key_folder(folder))
    except ConfigError as error:
        remedy = "Give another --keys DIR, listen on 127.0.0.1, or add --insecure if that network can be trusted"
        raise ConfigError(f"--bind={bind} needs keys: {error}. {remedy}") from error
    if not is_loopback(bind):  # an actor of this machine may name any of its addresses
        for own in ClientKeys.all(keys.folder):
            if own.server == keys.pair.public:
                own.at(addresses(bind))
    if new:
        logger.info(f"keys of this learner ({fingerprint(keys.pair.public)}) made in {keys.folder}")
    return keys


def invite_first(keys: ServerKeys, bind: str, port: int) -> None:
    """Print the line for the first robot PC, unless one has joined. It is a secret, and so no log record."""
    now = time.time()
    joined = [c.name for c in keys.clients() if c.state(now) == "joined" and c.name != THIS_MACHINE]
    if joined or is_loopback(bind):
        return
    line = how_to_join(keys, keys.invite(FIRST_ROBOT, addresses(bind), port))
    print(f"no robot PC has joined yet. {line}", flush=True)


def actor_keys(ip: str, folder: str | None, *, insecure: bool) -> ClientKeys | None:
    """Return the keys of an actor, or an evaluation, for the learner at `ip`; None where there are none.

    A given `folder` is binding, also on loopback, where a tunnel may begin. Raises ConfigError where it has no keys.
    """
    if insecure:
        return None
    keys = ClientKeys.find(key_folder(folder), ip)
    if keys is None and folder is not None:
        remedy = f"Run `serl-chunk keys add NAME` on the learner's machine, paste its line here (--keys {folder})"
        raise ConfigError(f"--keys={folder} has no key for a learner. {remedy}")
    return dataclasses.replace(keys, binding=True) if keys is not None and folder is not None else keys


def actor_name(actor_id: str | None, keys: ClientKeys | None, ip: str) -> str:
    """Return an actor's id: the name of its key, else `actor`. Raises ConfigError for another than a binding key's."""
    # The learner's own machine has one key for all its actors, which names none of them.
    if keys is None or keys.name == THIS_MACHINE:
        return actor_id or DEFAULT_ACTOR
    if keys.actors:
        name = actor_id or fleet_id(keys.actors, os.environ)
        expected = f"expected {keys.actors} (key {keys.name!r}, {keys.file})"
        require(name != "", "actor_id", f"no pod, array index or rank names this actor, {expected}. Give one.")
        require(not not_of_fleet(keys.actors, name), "actor_id", f"got {name!r}, {expected}. Give another.")
        return name
    if actor_id not in (None, keys.name) and (keys.binding or not is_loopback(ip)):
        raise ConfigError(
            f"--actor_id={actor_id}: the learner knows this machine's key as {keys.name!r} ({keys.file}). Leave "
            f"--actor_id out, or run `serl-chunk keys add {actor_id}` on the learner's machine and join with that line"
        )
    return actor_id or keys.name


def fleet_id(actors: str, environment: Mapping[str, str]) -> str:
    """Return an actor's id of the pod's name, the array index or the rank that `environment` has; "" for none."""
    if "KUBERNETES_SERVICE_HOST" in environment:
        place = environment.get("POD_NAME") or socket.gethostname()
    else:
        place = next((environment[name] for name in INDICES if environment.get(name)), "")
    return place if not place or not not_of_fleet(actors, place) else actors.replace("*", place)


def add_learner_flags(p: argparse.ArgumentParser, ip: str) -> None:
    """Add what an actor says of its learner. `ip`: help of that flag."""
    p.add_argument("--ip", help=ip)
    p.add_argument("--port", type=int, help="port of the learner, as actors reach it (default: 5588)")
    p.add_argument("--keys", metavar="DIR", help="folder of the keys (default: ~/.config/serl-chunk/keys)")
    p.add_argument("--insecure", action="store_true", help="use no keys")
    p.add_argument("--actor_id", help="name of this robot at the learner (default: as --actor)")
    p.add_argument("--spool_path", metavar="DIR", help="where records on their way are kept (default: runs/spool)")


@dataclasses.dataclass(frozen=True)
class LearnerAddress:
    """The address of a learner, and the name and keys of this machine there."""

    ip: str
    port: int
    actor_id: str | None = None  # None: the name of this machine's key
    keys: str | None = None  # the key folder; None: the default one
    insecure: bool = False  # use no keys
    file: Path | None = None  # names the address

    @classmethod
    def of(cls, flags: argparse.Namespace) -> LearnerAddress:
        """Read the flags of `add_learner_flags`. Raises ConfigError where they exclude each other."""
        both = flags.keys is not None and flags.insecure
        require(not both, "insecure", "it means no keys, and --keys is given. Remove one of them.")
        port = DEFAULT_PORT if flags.port is None else flags.port
        name = getattr(flags, "address_file", None)
        file = None if name is None else Path(name).expanduser()
        return cls(flags.ip or LOOPBACK, port, flags.actor_id, flags.keys, flags.insecure, file)

    def found(self) -> LearnerAddress:
        """Return the address that the file names, where one is given; wait for it."""
        wait = Waiting(logger)
        while self.file is not None:
            if (found := read_address(self.file)) is not None:
                return dataclasses.replace(self, ip=found[0], port=found[1])
            wait.log(f"{self.file} names no learner yet", "Start the learner of that run")
            time.sleep(0.2)
        return self

    def credentials(self) -> tuple[str, ClientKeys | None]:
        """Return the actor's id and keys. Raises ConfigError where they do not go together."""
        keys = actor_keys(self.ip, self.keys, insecure=self.insecure)
        return actor_name(self.actor_id, keys, self.ip), keys


def how_to_join(keys: ServerKeys, invitation: JoinToken) -> str:
    """Return the line to paste, with its limits."""
    return (
        f"On the robot PC, within ten minutes (it works once):\n\n  serl-chunk keys join '{invitation.encode()}'\n\n"
        f"another robot PC, or later: {add_line(keys.folder, invitation.port)} prints another line"
    )


def addresses(bind: str) -> list[str]:
    """Return the addresses under which robot PCs may find a learner that listens on `bind`."""
    if bind not in ("0.0.0.0", "::", "*"):
        return [bind]
    found = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect(("192.0.2.1", 9))  # of the range that belongs to no machine: picks a route, sends nothing
        found.append(str(s.getsockname()[0]))
    return [*found, socket.gethostname()]


def init_command(flags: argparse.Namespace) -> int:
    """Make the keys of this machine's learners."""
    keys, new = ServerKeys.ensure(key_folder(flags.keys))
    name = fingerprint(keys.pair.public)
    if not new:
        raise ConfigError(
            f"{keys.folder} holds a learner's keys ({name}) already: `serl-chunk keys add NAME` admits a robot PC. To "
            f"make new ones, move {keys.folder / 'server.json'} away first; every robot PC must then join again"
        )
    print(f"keys of this machine's learners ({name}) made in {keys.folder}; serl-chunk keys add NAME admits a robot PC")
    return 0


def add_command(flags: argparse.Namespace) -> int:
    """Print the line with which one robot PC joins, or where the key of a fleet's machines lies."""
    check_port(flags.port)
    require((flags.name is None) != (flags.fleet is None), "fleet", "give NAME of one robot PC, or --fleet NAME.")
    require(flags.actors is None or flags.fleet is not None, "actors", "is for --fleet. Remove it.")
    keys = ServerKeys.open(key_folder(flags.keys))
    hosts = addresses("0.0.0.0") if flags.host is None else [flags.host]
    if flags.fleet is not None:
        fleet = keys.add_fleet(flags.fleet, flags.actors or f"{flags.fleet}-*", hosts, flags.port)
        print(
            f"{fleet.folder} is the key folder of fleet {fleet.name!r} (actors {fleet.actors!r}). It holds a secret: "
            f"give it to each machine as --keys DIR. For all of them at once: serl-chunk keys revoke {fleet.name}"
        )
        return 0
    print(how_to_join(keys, keys.invite(flags.name, hosts, flags.port)))
    return 0


def join_command(flags: argparse.Namespace) -> int:
    """Make this machine's keys for the learner of a line, and join it. Raises ConfigError, RefusedError: bad line."""
    keys = ClientKeys.accept(key_folder(flags.keys), JoinToken.decode(flags.line))
    before = next((k for k in ClientKeys.all(keys.folder) if k.server == keys.server), None)
    if before is not None and before.line == keys.line:
        keys = before  # pasted twice: the learner may have the pair by now
        if keys.ticket is None:
            print(f"this machine has joined with that line already, as {keys.name!r}; key in {keys.file}")
            return 0
    joins_again = before is not None and before.ticket is None
    if not joins_again:
        keys.save()  # before the learner writes the public key, or a crash would lose the secret
    where = (flags.ip,) if flags.ip is not None else keys.hosts
    try:
        reached = _enrol(keys, where)
    except RefusedError as error:
        if not (joins_again or isinstance(error, UnencryptedPeerError)):
            keys.discard()
        raise
    learner = f"the learner {fingerprint(keys.server)}"
    if reached:
        print(f"joined {learner} as {keys.name!r}; key in {keys.file}")
    elif joins_again:
        raise ConfigError(
            f"{learner} cannot be reached at {_or(where, keys.port)}, and this machine has joined it already "
            f"({keys.file}, kept). If its key was revoked, start the learner and join again (--ip HOST if it moved)"
        )
    else:
        print(
            f"key for {learner} in {keys.file}. It cannot be reached at {_or(where, keys.port)} now. The actor joins "
            f"as {keys.name!r} when it first connects, within ten minutes after the line was printed"
        )
    more = "" if keys.port in (0, DEFAULT_PORT) else f" --port {keys.port}"
    more += "" if flags.keys is None else f" --keys {flags.keys}"
    print(f"start: serl-chunk --exp_name EXPERIMENT --actor --ip {reached or (where[0] if where else 'HOST')}{more}")
    return 0


def _enrol(keys: ClientKeys, hosts: Sequence[str]) -> str | None:
    """Join at the first address that answers; returns it."""
    for host in hosts:
        try:
            enroll(keys, TransportConfig(), host, keys.port, JOIN_TIMEOUT)
        except UnreachableError:
            continue
        return host
    return None


def _or(hosts: Sequence[str], port: int) -> str:
    return " or ".join(f"{host}:{port}" for host in hosts) or "any address"


def list_command(flags: argparse.Namespace) -> int:
    """Print the robot PCs admitted to this machine's learners, and the learners that this machine has joined."""
    path = key_folder(flags.keys)
    now, joined = time.time(), ClientKeys.all(path)
    if (path / "server.json").exists():
        keys = ServerKeys.open(path)
        print(f"this machine's learners: {fingerprint(keys.pair.public)} ({path / 'server.json'})")
        for client in keys.clients():
            state = client.state(now)
            print_of = fingerprint(client.public) if client.public else "-"
            more = f", {client.until - now:.0f} s left" if state == "invited" else ""
            more += f", a fleet's: {client.actors}" if client.actors else ""
            print(f"  {client.name:24} {state:8} {print_of:12} {_date(client.since)}{more}")
    elif not joined:
        print(f"no keys in {path}")
    for own in joined:
        standing = "to join at the first connection" if own.ticket else "joined"
        print(
            f"learner {fingerprint(own.server)}: this machine is {own.name!r} "
            f"({fingerprint(own.pair.public)}, {standing}, {_date(own.joined)}); seen at {', '.join(own.hosts) or '?'}"
        )
    return 0


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def revoke_command(flags: argparse.Namespace) -> int:
    """Revoke a robot PC's key; running learners disconnect it within a second."""
    client = ServerKeys.open(key_folder(flags.keys)).revoke(flags.name)
    what = f"key {fingerprint(client.public)}" if client.public else "an unused line"
    print(f"{flags.name} is revoked ({what}); running learners disconnect it within a second")
    return 0

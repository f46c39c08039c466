"""The handshake: an actor's hello, the comparison of both contracts, the welcome or a refusal.

Both sides bring a *contract*, a flat map of named fields (specs, rate, lengths, delay policy, action transform, agent);
they must be equal. The outer form of `hello` and of a refusal is the same in every protocol version, so that the
refusal's sentence always arrives.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from serl_chunk.config.compatibility import SETTINGS
from serl_chunk.io import atomic_write
from serl_chunk.types import ConfigError, PolicyOrigin, SerlChunkError
from serl_chunk.version import version_info
from serl_chunk_robot.wire import codec
from serl_chunk_robot.wire.codec import Frame, Message, WireError

Clock = Callable[[], float]  # seconds
Counters = collections.Counter[str]  # written by one thread, read by any: a reader may be one event behind

DEFAULT_PORT = 5588
ADDRESS = "address"  # file in a run folder: where its newest learner is
CHANNELS = ("data", "snapshots", "control")  # an actor's connections: no heartbeat waits behind a large message
TOKEN_BYTES = 16
TOKEN_MARK = b"\xc1"  # first byte of each: no msgpack begins with it, and so no message but those of the data thread
MAX_ARRAYS = 64  # of one message; an entry of a journal holds no more
CREDIT_BYTES = 32 << 20  # unacknowledged data that an actor may have in flight
# Kinds of control messages but for those of the handshake and of snapshots.
WHO, PING, BYE, FETCH, TICKETS = "who", "ping", "bye", "fetch", "tickets"  # actor -> learner
ENROL, ENROLLED = "enrol", "enrolled"  # a robot PC that joins -> learner, and its answer
INSPECT, FINDINGS = "inspect", "findings"  # any peer that may connect -> learner, and its answer
ECHO, ECHOED = "echo", "echoed"  # likewise
ACTORS, ACTOR_STATES = "actors", "actor_states"  # likewise
IDENTITY = "identity"  # learner -> actor, before anything else: which run this is
STATUS, REJOIN, FETCHED, FETCH_FAILED = "status", "rejoin", "fetched", "fetch_failed"  # learner -> actor
GRANT = "grant"  # likewise, of tickets
ACK = "ack"  # learner -> actor, on the data socket
PROTOCOL = 11
HELLO, WELCOME, REFUSED = "hello", "welcome", "refused"
DEMONSTRATIONS = "demonstrations"  # array of a welcome, uint8[N, 8]: digests of those that the learner has
_MAX_FIELDS = 256
_SHOWN = 100  # characters of a value in a refusal
_SPACES = ("state_dim", "action_dim", "robot_specs")  # fields of a contract that an environment's spaces make
MAX_ECHO_BYTES = 1 << 20
AT_ONCE = 512  # probes answered at once, from all peers together: a doctor needs about 150 ...
PER_S = 32.0  # ... and so many more a second
PAYLOAD = "payload"  # the array of an echo
_STATUS: codec.Checks = {  # of a LearnerStatus
    **dict.fromkeys(
        ("run", "differs", "taken_by", "not_ready", "stalled", "key"), functools.partial(codec.text, limit=1 << 16)
    ),
    **dict.fromkeys(("actors", "max_actors", "version", "snapshot_bytes", "free_bytes"), codec.exactly(int)),
    "finished": codec.exactly(str, type(None)),
}
_ECHO: codec.Checks = {"number": codec.count, "nbytes": codec.count, "clock": codec.exactly(float)}


def check_port(port: int) -> None:
    """Raise ConfigError unless `port` can exist."""
    if not 1 <= port <= 65535:
        raise ConfigError(f"must be 1..65535, got {port}", parameter="port")


def write_address(file: Path, host: str, port: int) -> None:
    """Let actors that read `file` find a learner, also one that moved. Raises OSError."""
    atomic_write(file, f"{host}:{port}\n")


def read_address(file: Path) -> tuple[str, int] | None:
    """Return the host and port in `file`; None where it cannot be read now, or holds none.

    Raises ConfigError where other users may write it: they could name a learner of theirs.
    """
    for path in (file.parent, file):
        try:
            at = path.stat()
        except OSError:
            return None
        # A group of its owner's number is its owner's alone: many systems let new files be written by that.
        if at.st_mode & (0o002 if at.st_gid == at.st_uid else 0o022):
            raise ConfigError(f"{path}: other users may write it. Run chmod go-w {path}", parameter="address_file")
    with contextlib.suppress(OSError, ValueError):
        host, _, port = file.read_text().strip().rpartition(":")
        check_port(int(port))
        return (host, int(port)) if re.fullmatch(r"[\w.:-]+", host, re.ASCII) else None
    return None


class RefusedError(SerlChunkError):
    """The learner refused this actor; the message is the learner's sentence."""


class UnreachableError(SerlChunkError):
    """No learner answered in the time given."""


class Hello(NamedTuple):
    """The first message of an actor with a session."""

    session: str  # names its stream of records
    incarnation: int  # of the session; a higher one fences the lower
    actor_id: str
    contract: dict[str, str]
    run: str  # the run its records belong to
    version: int  # newest snapshot it holds of that run, -1 for none
    first: int  # lowest sequence number it can still send
    next: int  # sequence number of its next record
    steps_before_first: int  # steps of the session below `first`
    steps_before_next: int  # steps of the session below `next`
    demonstrations: bool = False  # it sends demonstrations alone, and is no actor
    protocol: int = PROTOCOL

    def encode(self) -> list[Frame]:
        return codec.encode(HELLO, self._asdict())

    @classmethod
    def decode(cls, message: Message) -> Hello:
        """Return the hello in `message`. Raises WireError. One of another protocol has only `protocol` filled in."""
        h = message.header
        protocol = codec.count(h, "protocol")
        if protocol != PROTOCOL:
            return cls("", 0, "", {}, "", -1, 0, 0, 0, 0, protocol=protocol)
        hello = cls(**codec.fields(h, _CHECKS))
        if not hello.session or not hello.actor_id:
            raise WireError("a hello needs a session and an actor id")
        if hello.first > hello.next or hello.steps_before_first > hello.steps_before_next:
            raise WireError("a hello's first sequence number lies after its next")
        return hello


class Welcome(NamedTuple):
    """The learner's answer to an actor that it admits."""

    fields: dict[str, Any]  # plain values
    arrays: dict[str, np.ndarray]  # read-only; the normaliser's, for example
    run: str  # id of the run; snapshot versions never go back within one

    @property
    def origin(self) -> PolicyOrigin:
        return PolicyOrigin(self.run, str(self.fields.get("normaliser_digest", "")))


def contract_of(header: Mapping[str, Any], name: str = "contract") -> dict[str, str]:
    """Return the contract in a header. Raises WireError."""
    contract: dict[str, str] = codec.field(header, name, dict)
    if len(contract) > _MAX_FIELDS or not all(isinstance(x, str) for pair in contract.items() for x in pair):
        raise WireError(f"a contract maps at most {_MAX_FIELDS} names to strings")
    if unprintable := [name for name in contract if not name.isprintable()]:
        raise WireError(f"a contract's names hold characters that cannot be printed: {unprintable[0]!r}")
    return contract


def version_of(header: Mapping[str, Any], name: str) -> int:
    """Return the version of a snapshot in a header, -1 for none. Raises WireError."""
    version: int = codec.field(header, name, int)
    if not -1 <= version < 2**62:
        raise WireError(f"field {name!r} must be -1 or more, got {version}")
    return version


_CHECKS: codec.Checks = {  # of a Hello, after its `protocol`
    "contract": contract_of,
    "version": version_of,
    "session": functools.partial(codec.identifier, limit=64),
    "incarnation": codec.count,
    **dict.fromkeys(("actor_id", "run"), functools.partial(codec.identifier, limit=128)),
    **dict.fromkeys(("first", "next", "steps_before_first", "steps_before_next"), codec.count),
    "demonstrations": codec.exactly(bool),
}


def refusal(reason: str, *, retry: bool = False, renew: bool = False) -> list[Frame]:
    """Return frames that refuse an actor. `retry`: waiting may help. `renew`: a new session can go on."""
    return codec.encode(REFUSED, {"reason": reason, "retry": retry, "renew": renew})


def admitted(message: Message) -> Message:
    """Return a message that is no refusal. Raises RefusedError with the sentence of one, WireError."""
    if message.kind == REFUSED:
        raise RefusedError(codec.text(message.header, "reason", 1 << 16))
    return message


def compare(mine: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """Return what differs between the learner's contract and an actor's, with the remedy; empty where nothing does."""
    differing = [name for name in dict.fromkeys([*mine, *theirs]) if mine.get(name) != theirs.get(name)]
    if len(differing) > 1:  # other shapes are a consequence
        differing = [name for name in differing if name != "network"]
    if not differing:
        return ""
    shown, flags = [], []
    for name in differing:
        a, b, setting = mine.get(name), theirs.get(name), SETTINGS.get(name, name)
        if name == "network":
            a, b = _first_only_in(a, b), _first_only_in(b, a)
        shown.append(f"{setting} is {_part(a)} at the learner and {_part(b)} at the actor")
        if "." in setting and a is not None and b is not None:
            flags.append(f"--config.{setting}={a}")
    advice = "Start both with the same experiment, configuration and version of serl-chunk."
    if set(_SPACES) & set(differing) and not {"experiment", "robot", "control_hz"} & set(differing):
        advice = (
            "Check the environment first: its observations, cameras and actions must be declared alike on both "
            f"machines, and the learner's is made with fake_env=True. Then: {advice[0].lower()}{advice[1:]}"
        )
    if flags:
        advice = f"Give the actor the learner's {' '.join(flags)[: 5 * _SHOWN]}. {advice}"
    return f"learner and actor do not run the same experiment: {'; '.join(shown)}. {advice}"


def compare_protocol(theirs: int) -> str:
    """Return a sentence where the other side's protocol version differs; empty where it does not."""
    if theirs == PROTOCOL:
        return ""
    return (
        f"the learner ({version_info().text}) speaks transport protocol {PROTOCOL} and the actor {theirs}: "
        "install the same version of serl-chunk on both machines"
    )


def _first_only_in(mine: str | None, theirs: str | None) -> str | None:  # of shapes separated by semicolons
    others = set((theirs or "").split(";"))
    return next((shape for shape in (mine or "").split(";") if shape not in others), None)


def _part(value: str | None) -> str:
    return "absent" if value is None else repr(value if len(value) <= _SHOWN else f"{value[:_SHOWN]}...")


class StatusRequest(NamedTuple):
    """The hello that an actor would send."""

    actor_id: str
    contract: dict[str, str]  # empty: no comparison is requested

    def encode(self) -> list[Frame]:
        return codec.encode(INSPECT, self._asdict())

    @classmethod
    def decode(cls, message: Message) -> StatusRequest:
        if message.arrays:
            raise WireError("an inspection carries no arrays")
        return cls(codec.identifier(message.header, "actor_id", 128), contract_of(message.header))


class LearnerStatus(NamedTuple):
    """The learner's answer to an inspection. A text that does not apply is empty."""

    run: str
    differs: str  # the sentence that an actor with that contract is refused with
    taken_by: str  # address of the live actor that has the id
    not_ready: str  # why an actor has to wait
    stalled: str  # why no record is taken now
    finished: str | None  # why training is over
    key: str  # what the asking machine's key is called
    actors: int  # live sessions ...
    max_actors: int  # ... and how many there may be
    version: int  # newest snapshot, -1 for none
    snapshot_bytes: int  # of that
    free_bytes: int  # room on the journal's disk, -1 without a journal

    def encode(self) -> list[Frame]:
        return codec.encode(FINDINGS, self._asdict())

    @classmethod
    def decode(cls, message: Message) -> LearnerStatus:
        return cls(**codec.fields(message.header, _STATUS))


class ActorState(NamedTuple):
    """An actor that the learner knows."""

    actor_id: str
    connected: bool
    steps: int  # delivered
    silent_s: float  # since the learner heard from it
    restarts: int  # of its process
    snapshot_age_s: float  # since the snapshot that it holds was published; -1 for none, or an unknown one
    unacknowledged: int  # records that it had and the learner lacked at its last heartbeat

    @classmethod
    def decode_all(cls, message: Message) -> list[ActorState]:
        """Return those in an answer to ACTORS. Raises WireError."""
        rows: list[Any] = codec.field(message.header, "actors", list)
        kinds = [str, bool, int, float, int, float, int]
        if not all(isinstance(row, list) and [type(value) for value in row] == kinds for row in rows):
            raise WireError(f"an actor's state is a list of {len(kinds)} values")
        return [cls(*row) for row in rows if row[0].isprintable()]


class Echo(NamedTuple):
    """The learner's answer to an echo."""

    number: int  # of the echo
    nbytes: int  # that it carried
    clock: float  # unix seconds at the learner

    @classmethod
    def decode(cls, message: Message) -> Echo:
        return cls(**codec.fields(message.header, _ECHO))


def answer_echo(message: Message) -> list[Frame]:
    """Return the answer to an echo. Raises WireError where it carries anything but at most MAX_ECHO_BYTES."""
    number = codec.count(message.header, "number")
    if set(message.arrays) - {PAYLOAD}:
        raise WireError(f"an echo carries one array, {PAYLOAD!r}")
    nbytes = sum(array.nbytes for array in message.arrays.values())
    if nbytes > MAX_ECHO_BYTES:
        raise WireError(f"an echo of {nbytes} bytes; the limit is {MAX_ECHO_BYTES}")
    return codec.encode(ECHOED, Echo(number, nbytes, time.time())._asdict())

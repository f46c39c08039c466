"""Probes of `serl-chunk doctor`, and the learner's answers.

A probe opens no session, and so ousts no actor. An *inspection* requests the answer that an actor with this id and
contract would get, an *echo* carries bytes that are counted. Both are answered in few bytes, and at a limited rate.
"""

from __future__ import annotations

import functools
import time
from typing import NamedTuple

from serl_chunk.transport.wire import handshake
from serl_chunk_robot.wire import codec
from serl_chunk_robot.wire.codec import Frame, Message, WireError

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


class StatusRequest(NamedTuple):
    """The hello that an actor would send."""

    actor_id: str
    contract: dict[str, str]  # empty: no comparison is requested

    def encode(self) -> list[Frame]:
        return codec.encode(handshake.INSPECT, self._asdict())

    @classmethod
    def decode(cls, message: Message) -> StatusRequest:
        if message.arrays:
            raise WireError("an inspection carries no arrays")
        return cls(codec.identifier(message.header, "actor_id", 128), handshake.contract_of(message.header))


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
        return codec.encode(handshake.FINDINGS, self._asdict())

    @classmethod
    def decode(cls, message: Message) -> LearnerStatus:
        return cls(**codec.fields(message.header, _STATUS))


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
    return codec.encode(handshake.ECHOED, Echo(number, nbytes, time.time())._asdict())

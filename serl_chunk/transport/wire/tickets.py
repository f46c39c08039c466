"""Tickets on the wire: what an actor holds and can run, and which tickets the learner lets it hold."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from serl_chunk.transport.wire.handshake import GRANT, version_of
from serl_chunk.types import MAX_TICKET_TEXT, Grant, Ticket
from serl_chunk_robot.wire import codec
from serl_chunk_robot.wire.codec import Frame, Message, WireError

MAX_TICKETS = 256  # of a session: with their texts they fit a header


class TicketRequest(NamedTuple):
    """A session's request. The newest one holds until the next: the learner answers again when its answer changes."""

    version: int  # newest snapshot that the actor has, -1 for none
    held: tuple[str, ...]  # ids of the tickets that it has
    capacity: int  # tickets that it can hold in all

    @classmethod
    def decode(cls, message: Message) -> TicketRequest:
        """Return the request in `message`. Raises WireError."""
        request = cls(**codec.fields(message.header, _REQUEST))
        if request.capacity > MAX_TICKETS:
            raise WireError(f"field 'capacity' is {request.capacity}; the limit is {MAX_TICKETS}")
        return request


def encode_grant(grant: Grant) -> list[Frame]:
    """Return the frames of a grant of at most MAX_TICKETS tickets."""
    return codec.encode(GRANT, {"tickets": [list(ticket) for ticket in grant.tickets], "waiting": grant.waiting})


def decode_grant(message: Message) -> Grant:
    """Return the grant in `message`. Raises WireError."""
    rows = _short_list(message.header, "tickets")
    waiting = codec.shown(codec.text(message.header, "waiting"))
    return Grant(tuple(_ticket(row) for row in rows), waiting)


def _ticket(row: Any) -> Ticket:
    if not isinstance(row, list) or len(row) != len(Ticket._fields):
        raise WireError(f"field 'tickets' holds lists of {', '.join(Ticket._fields)}, got {row!r:.200}")
    return Ticket(**codec.fields(dict(zip(Ticket._fields, row, strict=True)), _TICKET))


def _short_list(header: Mapping[str, Any], name: str) -> list[Any]:
    values: list[Any] = codec.field(header, name, list)
    if len(values) > MAX_TICKETS:
        raise WireError(f"field {name!r} has {len(values)} values; the limit is {MAX_TICKETS}")
    return values


def _ids(header: Mapping[str, Any], name: str) -> tuple[str, ...]:
    return tuple(codec.identifier({name: value}, name, limit=64) for value in _short_list(header, name))


def _seconds(header: Mapping[str, Any], name: str) -> float:
    value: float = codec.field(header, name, float)
    if not 0 < value < math.inf:
        raise WireError(f"field {name!r} must be a positive number of seconds, got {value}")
    return value


_REQUEST: codec.Checks = {"version": version_of, "held": _ids, "capacity": codec.count}
_TICKET: codec.Checks = {
    **dict.fromkeys(("iteration", "group", "slot", "attempt", "seed"), codec.count),
    "task": functools.partial(codec.text, limit=MAX_TICKET_TEXT),
    "init_state": functools.partial(codec.identifier, limit=MAX_TICKET_TEXT),
    "version": version_of,
    "lease": _seconds,
}

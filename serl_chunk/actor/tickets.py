"""An actor's tickets: which it holds, which of them it may begin, and which were withdrawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from serl_chunk.types import Grant, Ticket


class TicketLink(Protocol):
    """What the tickets of an actor need of its link."""

    @property
    def grant(self) -> Grant | None: ...

    def request_tickets(self, held: Sequence[str], capacity: int) -> None: ...


class Tickets:
    """The tickets of an actor with so many `robots`.

    A few more are requested than there are robots, so that none waits for an answer when its episode has ended. A
    ticket whose episode has ended is granted until the learner has its records; it is not begun again.
    """

    def __init__(self, link: TicketLink, robots: int) -> None:
        self._link, self._wanted = link, robots + max(1, robots // 4)
        self._begun: set[str] = set()  # of those that are granted
        self._ready: dict[str, Ticket] = {}
        self._requested: tuple[list[str], int] | None = None
        self.waiting = "no ticket has come yet"  # why there is none to begin

    def update(self, under_way: Sequence[str], version: int) -> set[str]:
        """Take in the learner's newest answer, and request again; returns the tickets `under_way` that it withdrew.

        `version`: of the actor's policy. A ticket of an older one is given back.
        """
        grant = self._link.grant
        granted = {} if grant is None else {ticket.id: ticket for ticket in grant.tickets}
        withdrawn = set() if grant is None else set(under_way) - granted.keys()
        if grant is not None:
            self.waiting = grant.waiting
            self._begun &= granted.keys()
        self._ready = {n: t for n, t in granted.items() if n not in self._begun and t.version >= version}
        running = [name for name in under_way if name not in withdrawn]
        ended = len(self._begun) - len(running)
        request = [*running, *self._ready], self._wanted + ended
        if request != self._requested:
            self._requested = request
            self._link.request_tickets(*request)
        return withdrawn

    def begin(self, version: int) -> Ticket | None:
        """Return a ticket for a policy of `version`, and count it as begun; None where there is none now."""
        for name, ticket in self._ready.items():
            if ticket.version == version:
                del self._ready[name]
                self._begun.add(name)
                return ticket
        if self._ready:
            self.waiting = f"snapshot {next(iter(self._ready.values())).version} is on its way"
        return None

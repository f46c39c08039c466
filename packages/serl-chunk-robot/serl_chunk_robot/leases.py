"""Who is connected to a robot's server, and which of them is its controller. Times are given, s."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple, Optional

from serl_chunk_robot.loop import Refused
from serl_chunk_robot.safety.table import OPERATOR, RUN

SILENCE = 2.0  # s outside RUN, after which the lease ends; in RUN silence is the watchdog's
MOST_CLIENTS = 64


class Client(NamedTuple):
    """One client. `name` is its identity as an actor, with that of its key where keys are required."""

    name: str
    role: str  # ANY or OPERATOR; the controller is who holds the lease


class Clients:
    """The connections that sent hello, `MOST_CLIENTS` at most: ROUTER sockets do not report who left."""

    def __init__(self) -> None:
        self._clients: OrderedDict[bytes, Client] = OrderedDict()

    def __len__(self) -> int:
        return len(self._clients)

    def add(self, connection: bytes, client: Client, keep: bytes) -> None:
        """Add or replace a client. One too many is forgotten, but for `keep`, the connection that has the lease.

        That is the longest silent one that is no operator; the longest silent operator where all others are.
        """
        self._clients[connection] = client
        self._clients.move_to_end(connection)
        if len(self._clients) > MOST_CLIENTS:
            others = [c for c in self._clients if c != keep]
            del self._clients[next((c for c in others if self._clients[c].role != OPERATOR), others[0])]

    def heard(self, connection: bytes) -> Optional[Client]:
        """The client that sent a message just now; None for one that has to send hello first."""
        client = self._clients.get(connection)
        if client is not None:
            self._clients.move_to_end(connection)
        return client


class Lease:
    """The lease of the controller: one connection of one actor."""

    def __init__(self) -> None:
        self.holder = ""  # the actor's name; empty: no one
        self.connection = b""
        self._heard = 0.0

    def take(self, connection: bytes, name: str, now: float) -> bool:
        """Give the lease to a connection of the actor `name`; returns whether another connection lost it.

        An actor that comes back gets its own lease at once. Raises Refused while another actor has it.
        """
        if self.holder not in ("", name):
            raise Refused(f"{self.holder} controls the robot. Wait until it drops the lease, or stop that actor.")
        moved = self.holder == name and self.connection != connection
        self.holder, self.connection, self._heard = name, connection, now
        return moved

    def check(self, connection: bytes, op: str) -> None:
        """Raise Refused where a connection does not hold the lease."""
        if not self.holder:
            raise Refused(f"{op}: no actor holds the lease. Send lease first.")
        if connection != self.connection:
            raise Refused(f"{op}: {self.holder} controls the robot")

    def heard(self, connection: bytes, now: float) -> None:
        """A message came; the holder's renews the lease."""
        if connection == self.connection:
            self._heard = now

    def drop(self, connection: bytes) -> bool:
        """End the lease of a connection; returns whether it had it."""
        held = bool(self.holder) and connection == self.connection
        if held:
            self.holder, self.connection = "", b""
        return held

    def expire(self, now: float, state: str) -> str:
        """End a lease whose holder is silent; returns the actor's name, empty where nothing ended."""
        if not self.holder or state == RUN or now - self._heard <= SILENCE:
            return ""
        name, self.holder, self.connection = self.holder, "", b""
        return name

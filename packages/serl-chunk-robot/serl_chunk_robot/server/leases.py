"""Who is connected to a robot's server, and which of them is its controller. Times are given, s."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple, Optional

from serl_chunk_robot.control.loop import Refused
from serl_chunk_robot.safety.table import OPERATOR, RUN

SILENCE = 2.0  # s outside RUN, after which the lease ends; in RUN silence is the watchdog's
MOST_CLIENTS = 64


class Client(NamedTuple):
    """One client. Name and process are its identity as an actor; the name holds its key's where keys are required."""

    name: str
    role: str  # ANY or OPERATOR; the controller is who holds the lease
    process: str = ""


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

    def heard_from(self, connection: bytes) -> Optional[Client]:
        """The client that sent a message just now; None for one that has to send hello first."""
        client = self._clients.get(connection)
        if client is not None:
            self._clients.move_to_end(connection)
        return client


class Lease:
    """The lease of the controller: one connection of one process of an actor."""

    def __init__(self) -> None:
        self.holder = self.process = ""  # the actor's name; empty: no one
        self.connection = b""
        self._heard = 0.0

    def take(self, connection: bytes, client: Client, now: float) -> bool:
        """Give the lease to a connection of `client`; returns whether another connection of the same process lost it.

        A process that comes back gets its own lease at once. Raises Refused while another one has it, also one of the
        same name.
        """
        holder = self.holder, self.process
        if self.holder and holder != (client.name, client.process):
            who = f"another process of {self.holder}" if self.holder == client.name else self.holder
            raise Refused(
                f"{who} controls the robot. Wait until it drops the lease, end it, or let an operator run "
                "`serl-chunk robot take`."
            )
        moved = bool(self.holder) and self.connection != connection
        self.holder, self.process, self.connection, self._heard = client.name, client.process, connection, now
        return moved

    def check(self, connection: bytes, op: str) -> None:
        if not self.holder:
            raise Refused(f"{op}: no actor holds the lease. Send lease first.")
        if connection != self.connection:
            raise Refused(f"{op}: {self.holder} controls the robot")

    def check_shown(self, name: str, process: str) -> None:
        """Raise Refused where the lease is of another process of an actor than the one that the operator was shown."""
        if not self.holder:
            raise Refused("go: no actor holds the lease. Start the actor first; it waits for go.")
        if (name, process) != (self.holder, self.process):
            raise Refused(
                f"go: {self.holder} (process {self.process}) controls the robot now, not {name or 'no one'} "
                f"(process {process or 'none'}). Look at it, and say go again."
            )

    def renew(self, connection: bytes, now: float) -> None:
        """A message came; the holder's renews the lease."""
        if connection == self.connection:
            self._heard = now

    def drop(self, connection: bytes) -> bool:
        """End the lease of a connection; returns whether it had it."""
        return bool(self.holder) and connection == self.connection and bool(self.end())

    def end(self) -> str:
        """End the lease; returns the actor's name, empty where no one had it."""
        name, self.holder, self.process, self.connection = self.holder, "", "", b""
        return name

    def expire(self, now: float, state: str) -> str:
        """End a lease whose holder is silent; returns the actor's name, empty where nothing ended."""
        silent = self.holder and state != RUN and now - self._heard > SILENCE
        return self.end() if silent else ""

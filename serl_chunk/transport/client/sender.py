"""What of a spool is on its way to the learner: sent within a credit, sent again where it was lost."""

from __future__ import annotations

import collections
import logging
import time

import zmq

from serl_chunk.transport.sockets import try_send
from serl_chunk.transport.storage.journal import JournalError
from serl_chunk.transport.storage.spool import Entry, Spool

log = logging.getLogger(__name__)


class Sender:
    """Sends a spool's entries in order, at most `credit_bytes` of them unacknowledged at a time.

    Used by the network thread alone; others may read.
    """

    def __init__(self, credit_bytes: int) -> None:
        self.blocked = False  # the socket took no more; poll it for writing
        self.unreadable = ""  # why the spool gives nothing back
        self.retransmitted = 0  # records
        self.progress_at = time.monotonic()  # when the learner last acknowledged, or nothing was in flight
        self.in_flight_bytes = 0
        self._credit = credit_bytes
        self._in_flight: collections.deque[tuple[int, int]] = collections.deque()  # (end, nbytes) of each message sent
        self._next = self._sent_once = 0

    def take(self, spool: Spool) -> None:
        """Go on with another spool, nothing of which has been sent to this learner."""
        self._sent_once = spool.acked
        self.restart(spool)

    def restart(self, spool: Spool) -> None:
        """Nothing is in flight any more: go on behind what is acknowledged."""
        self._next = spool.acked
        self._in_flight.clear()
        self.in_flight_bytes = 0
        self.progress_at = time.monotonic()

    def pump(self, spool: Spool, socket: zmq.Socket[bytes], token: bytes) -> None:
        """Send what the credit and the socket take."""
        self.blocked = False
        if not self._in_flight:
            self.progress_at = time.monotonic()
        while (entry := self._next_entry(spool)) is not None:
            if self._in_flight and self.in_flight_bytes + entry.nbytes > self._credit:
                return
            if not try_send(socket, [token, *entry.frames]):
                self.blocked = True
                return
            self._next = entry.end
            if entry.end <= self._sent_once:
                self.retransmitted += entry.span
            self._sent_once = max(self._sent_once, entry.end)
            self._in_flight.append((entry.end, entry.nbytes))
            self.in_flight_bytes += entry.nbytes

    def _next_entry(self, spool: Spool) -> Entry | None:
        """What is to be sent next; None where there is nothing, or the disk does not give it back now."""
        try:
            entry = spool.at(self._next)
        except JournalError as e:
            if not self.unreadable:
                log.error("%s: it is tried again", e)
            self.unreadable = str(e)
            return None
        self.unreadable = ""
        return entry

    def acknowledged(self, spool: Spool, seq: int, *, gap: bool) -> None:
        """The learner has everything below `seq`; with `gap`, it asks for what follows `seq` again."""
        if spool.acknowledge(min(seq, spool.next)):
            self.progress_at = time.monotonic()
        if gap:
            self.restart(spool)
        while self._in_flight and self._in_flight[0][0] <= spool.acked:
            self.in_flight_bytes -= self._in_flight.popleft()[1]

    def wait(self) -> None:
        """The learner cannot take anything now, and says so: what is in flight is not late."""
        self.progress_at = time.monotonic()

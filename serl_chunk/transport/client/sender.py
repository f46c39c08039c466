"""What of a spool is on its way to the learner: sent within a credit, sent again where it was lost.

What the link does not carry at once travels in parts (`wire/parts.py`): the learner reports how far they have come.
"""

from __future__ import annotations

import collections
import logging
import time
from typing import NamedTuple

import zmq

from serl_chunk.transport.client.flow import Flow, Sent
from serl_chunk.transport.sockets import try_send
from serl_chunk.transport.storage.journal import JournalError
from serl_chunk.transport.storage.spool import Kept, Spool
from serl_chunk.transport.wire import codec
from serl_chunk.transport.wire.parts import MAX_PART_BYTES, encode_part

log = logging.getLogger(__name__)


class Arrived(NamedTuple):
    """How far the learner has received a session's stream, taken down or not."""

    seq: int  # everything below
    first: int = -1  # the record of which parts have come besides; -1 for none
    nbytes: int = 0  # how many of its bytes


class _Message(NamedTuple):
    """One message on its way: a record, or the bytes of one up to `reach`."""

    end: int
    first: int
    reach: int
    sent: Sent

    def is_in(self, arrived: Arrived) -> bool:
        return self.end <= arrived.seq or (self.first == arrived.first and self.reach <= arrived.nbytes)


class Sender:
    """Sends a spool's entries in order, at most `credit_bytes` of them unacknowledged at a time.

    Used by the network thread alone; others may read.
    """

    def __init__(self, credit_bytes: int, timeout_s: float) -> None:
        self.spool: Spool | None = None
        self.blocked = False  # the socket took no more; poll it for writing
        self.unreadable = ""  # why the spool gives nothing back
        self.retransmitted = 0  # records
        self.progress_at = time.monotonic()  # when the learner last received something, or nothing was in flight
        self.in_flight_bytes = 0  # not acknowledged
        self.flow = Flow(most=credit_bytes, largest=MAX_PART_BYTES, timeout_s=timeout_s)
        self._credit = credit_bytes
        self._in_flight: collections.deque[tuple[int, int]] = collections.deque()  # (end, nbytes) of each message sent
        self._on_way: collections.deque[_Message] = collections.deque()  # of these, what has not arrived
        self._next = self._sent_once = 0
        self._begun: Kept | None = None  # the record at `_next`, of which `_offset` bytes were sent
        self._offset = 0
        self._resume = Arrived(0)  # what the learner has of the record that was under way

    def take(self, spool: Spool) -> None:
        """Go on with another spool, nothing of which has been sent to this learner."""
        self.spool, self._sent_once = spool, spool.acked
        self.restart(Arrived(0))

    def restart(self, arrived: Arrived) -> None:
        """Nothing is in flight any more: go on behind what is acknowledged, and within a record where it ends."""
        assert self.spool is not None
        self._next = self.spool.acked
        self._begun, self._offset, self._resume = None, 0, arrived
        self._in_flight.clear()
        self._on_way.clear()
        self.flow.restart()
        self.in_flight_bytes = 0
        self.progress_at = time.monotonic()

    def pump(self, socket: zmq.Socket[bytes], token: bytes) -> None:
        """Send what the credit, the link and the socket take."""
        self.blocked = False
        if not self._in_flight:
            self.progress_at = time.monotonic()
        while (kept := self._begun or self._next_kept()) is not None:
            item, frames, disk_bytes = kept
            if not self._offset and self._in_flight and self.in_flight_bytes + disk_bytes > self._credit:
                return
            # What a record takes on a disk is a little more than its frames, and of a lost one much more.
            size = disk_bytes if disk_bytes <= self.flow.message_bytes else codec.size_of(frames)
            if item.first == self._resume.first and 0 < self._resume.nbytes < size:
                self._begun, self._offset, self._resume = kept, self._resume.nbytes, Arrived(0)
            nbytes = self.flow.cut(size - self._offset)
            if not self.flow.has_room(nbytes):
                return
            if nbytes < size:
                frames = encode_part(item.first, item.span, frames, self._offset, nbytes)
            if not try_send(socket, [token, *frames]):
                self.blocked = True
                return
            self._count(kept, self._offset + nbytes, nbytes, last=self._offset + nbytes == size)

    def _count(self, kept: Kept, reach: int, nbytes: int, *, last: bool) -> None:
        item = kept.item
        self._on_way.append(_Message(item.end, item.first, reach, self.flow.send(nbytes)))
        self._in_flight.append((item.end, nbytes))
        self.in_flight_bytes += nbytes
        if not last:
            self._begun, self._offset = kept, reach
            return
        self._begun, self._offset, self._next = None, 0, item.end
        if item.end <= self._sent_once:
            self.retransmitted += item.span
        self._sent_once = max(self._sent_once, item.end)

    def _next_kept(self) -> Kept | None:
        """What is to be sent next; None where there is nothing, or the disk does not give it back now."""
        if self.spool is None or self._next == self.spool.next:
            return None
        try:
            kept = self.spool.at(self._next)
        except JournalError as e:
            if not self.unreadable:
                log.error("%s: it is tried again", e)
            self.unreadable = str(e)
            return None
        self.unreadable = ""
        return kept

    def acknowledged(self, seq: int, *, gap: bool = False, arrived: Arrived | None = None) -> None:
        """The learner has everything below `seq` for good; with `gap`, it requests what follows `arrived` again."""
        spool = self.spool
        if spool is None:
            return
        if spool.acknowledge(min(seq, spool.next)):
            self.progress_at = time.monotonic()
        arrived = arrived or Arrived(seq)
        before = len(self._on_way)
        while self._on_way and self._on_way[0].is_in(arrived):
            self.flow.arrive(self._on_way.popleft().sent)
        if len(self._on_way) < before:
            self.progress_at = time.monotonic()
        if gap:
            self.restart(arrived)
        while self._in_flight and self._in_flight[0][0] <= spool.acked:
            self.in_flight_bytes -= self._in_flight.popleft()[1]

    def wait(self) -> None:
        """The learner reports that it cannot take anything now: what is in flight is not late."""
        self.progress_at = time.monotonic()

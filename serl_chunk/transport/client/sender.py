"""Sends an actor's spooled records within a credit, and sends again what was lost."""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import NamedTuple

import zmq

from serl_chunk.transport.client.flow import Flow, Sent
from serl_chunk.transport.storage.journal import JournalError
from serl_chunk.transport.storage.spool import Kept, Spool
from serl_chunk.transport.wire.parts import MAX_PART_BYTES, encode_part
from serl_chunk_robot.wire import codec
from serl_chunk_robot.wire.sockets import try_send

log = logging.getLogger(__name__)


class Arrived(NamedTuple):
    """How far the learner has received a session's stream, journalled or not."""

    seq: int  # everything below
    first: int = -1  # the record of which parts have arrived in addition; -1 for none
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
    """Sends a spool's entries in order, at most `credit_bytes` of them unacknowledged. For the network thread.

    What the link does not carry at once travels in parts (`wire/parts.py`).
    """

    def __init__(self, credit_bytes: int, timeout_s: float) -> None:
        self.spool: Spool | None = None
        self.blocked = False  # the socket took no more; poll it for writing
        self._unreadable = False  # the spool gives nothing back
        self.retransmitted = 0  # records
        self.progress_at = time.monotonic()  # when the learner last received something, or nothing was in flight
        self.in_flight_bytes = 0  # not acknowledged
        self.flow = Flow(most=credit_bytes, largest=MAX_PART_BYTES, timeout_s=timeout_s)
        self._credit = credit_bytes
        self._in_flight: deque[tuple[int, int]] = deque()  # (end, nbytes) of each message sent
        self._on_way: deque[_Message] = deque()  # of these, what has not arrived
        self._next = self._sent_once = 0
        self._begun: Kept | None = None  # the record at `_next`, of which `_offset` bytes were sent
        self._offset = 0
        self._resume = Arrived(0)  # what the learner has of the record that was under way

    def take(self, spool: Spool) -> None:
        """Continue with a spool of which nothing has been sent to this learner."""
        self.spool, self._sent_once = spool, spool.acked
        self.restart(Arrived(0))

    def restart(self, arrived: Arrived) -> None:
        """Forget what is in flight: continue behind what is acknowledged, and within a record at `arrived`."""
        assert self.spool is not None
        self._next = self.spool.acked
        self._begun, self._offset, self._resume = None, 0, arrived
        self._in_flight.clear()
        self._on_way.clear()
        self.flow.restart()
        self.in_flight_bytes = 0
        self.wait()

    def pump(self, socket: zmq.Socket[bytes], token: bytes) -> None:
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
            reach = self._offset + nbytes
            self._on_way.append(_Message(item.end, item.first, reach, self.flow.send(nbytes)))
            self._in_flight.append((item.end, nbytes))
            self.in_flight_bytes += nbytes
            if reach < size:
                self._begun, self._offset = kept, reach
                continue
            self._begun, self._offset, self._next = None, 0, item.end
            if item.end <= self._sent_once:
                self.retransmitted += item.span
            self._sent_once = max(self._sent_once, item.end)

    def _next_kept(self) -> Kept | None:
        try:
            kept = None if self.spool is None else self.spool.at(self._next)
        except JournalError as e:
            if not self._unreadable:
                log.error("%s: it is tried again", e)
            kept, self._unreadable = None, True
        else:
            self._unreadable = False
        return kept

    def acknowledged(self, seq: int, *, gap: bool = False, arrived: Arrived | None = None) -> None:
        """Note that the learner holds everything below `seq`; with `gap`, send again what follows `arrived`."""
        if (spool := self.spool) is None:
            return
        arrived = arrived or Arrived(seq)
        progress = spool.acknowledge(min(seq, spool.next)) > 0
        while self._on_way and self._on_way[0].is_in(arrived):
            self.flow.arrive(self._on_way.popleft().sent)
            progress = True
        if progress:
            self.wait()
        if gap:
            self.restart(arrived)
        while self._in_flight and self._in_flight[0][0] <= spool.acked:
            self.in_flight_bytes -= self._in_flight.popleft()[1]

    def wait(self) -> None:
        """Count as progress: the learner cannot take anything now."""
        self.progress_at = time.monotonic()

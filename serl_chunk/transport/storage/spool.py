"""What an actor keeps until the learner has it.

A spool holds one session's records, of one run. `MemorySpool` survives a learner's restart; `DiskSpool`, in a module
of its own, survives the actor's too.
"""

from __future__ import annotations

import uuid
from collections import OrderedDict
from typing import NamedTuple, Protocol

from serl_chunk.transport.wire import records
from serl_chunk.transport.wire.codec import Frame

LOST = "lost"  # stands for records that a damaged disk took: the learner steps over their numbers


class Entry(NamedTuple):
    """One encoded record."""

    kind: str  # of records.KINDS
    first: int  # lowest sequence number
    span: int  # sequence numbers it takes: steps of a block, else 1
    frames: list[Frame]
    nbytes: int

    @property
    def end(self) -> int:
        """The sequence number after its last."""
        return self.first + self.span

    @property
    def steps(self) -> int:
        """Steps it holds."""
        return self.span if self.kind == records.STEPS else 0


class Spool(Protocol):
    """A session's records, in order, from `first` (kept) over `acked` (the learner has all below) to `next`.

    Used by one thread, except for the two byte counts, which any thread may read.
    """

    durable: bool  # what `append` recorded survives the process
    session: str  # names the stream; another incarnation of the same session continues it
    incarnation: int
    first: int
    acked: int
    next: int
    unacked_bytes: int
    steps: int  # of the session, below `next`
    steps_before_first: int  # of these, no longer kept

    @property
    def nbytes(self) -> int:
        """Bytes of everything kept."""

    def append(self, kind: str, span: int, frames: list[Frame], nbytes: int) -> Entry:
        """Record one message at `next`; when this returns, it is recorded."""

    def acknowledge(self, seq: int) -> int:
        """The learner has everything below `seq`; returns how many sequence numbers that acknowledged anew."""

    def rewind(self) -> None:
        """The learner knows nothing of the session: everything kept counts as unacknowledged again."""

    def at(self, seq: int) -> Entry | None:
        """The kept entry that holds `seq`, or None where `seq` is `next`."""

    def retire(self) -> bool:
        """All is acknowledged, and no process continues the session: the learner may forget it. False on a bad disk."""

    def free_bytes(self) -> int:
        """Room where it is kept."""

    def close(self) -> None:
        """Release what is held outside memory. What is not acknowledged stays there, where that can be."""


class MemorySpool:
    """A spool in memory.

    Keeps what is not acknowledged and, beyond that, the open episode from its beginning until its end is
    acknowledged: a restarted learner that kept nothing then receives the episode whole. The acknowledged part gives
    way when `capacity` bytes are reached; unacknowledged records are never dropped, so an episode that began below
    the capacity may exceed it.
    """

    durable = False

    def __init__(self, capacity: int) -> None:
        self.session = uuid.uuid4().hex
        self.incarnation = 1
        self.first = self.acked = self.next = 0
        self.nbytes = self.unacked_bytes = 0
        self.steps = self.steps_before_first = 0
        self._capacity = capacity
        self._entries: OrderedDict[int, Entry] = OrderedDict()
        self._open_at: int | None = None  # first number of the episode that is open at `acked`

    def append(self, kind: str, span: int, frames: list[Frame], nbytes: int) -> Entry:
        """See Spool."""
        entry = Entry(kind, self.next, span, frames, nbytes)
        self._entries[entry.first] = entry
        self.next = entry.end
        self.steps += entry.steps
        self.nbytes += nbytes
        self.unacked_bytes += nbytes
        self._trim()
        return entry

    def acknowledge(self, seq: int) -> int:
        """See Spool. A number inside a block leaves that whole block unacknowledged: the learner trims it."""
        before = self.acked
        while (entry := self._entries.get(self.acked)) is not None and entry.end <= seq:
            self.acked = entry.end
            self.unacked_bytes -= entry.nbytes
            if entry.kind == records.BEGIN:
                self._open_at = entry.first
            elif entry.kind == records.END:
                self._open_at = None
        self._trim()
        return self.acked - before

    def _trim(self) -> None:
        keep = self.acked if self._open_at is None else self._open_at
        while self._entries:
            entry = next(iter(self._entries.values()))
            if entry.end > self.acked or (entry.end > keep and self.nbytes <= self._capacity):
                return
            self._drop(entry)

    def _drop(self, entry: Entry) -> None:
        del self._entries[entry.first]
        self.first = entry.end
        self.nbytes -= entry.nbytes
        self.steps_before_first += entry.steps

    def rewind(self) -> None:
        """See Spool."""
        self.acked = self.first
        self.unacked_bytes = self.nbytes
        self._open_at = None

    def at(self, seq: int) -> Entry | None:
        """See Spool."""
        if (entry := self._entries.get(seq)) is not None or seq >= self.next:
            return entry
        return next((e for e in self._entries.values() if e.first <= seq < e.end), None)

    def retire(self) -> bool:
        """See Spool. The session ends with its process."""
        return True

    def free_bytes(self) -> int:
        """See Spool. Memory is not counted here."""
        return 1 << 62

    def close(self) -> None:
        """See Spool."""

"""The actor's records on their way out: queued, packed, spooled; `sender.py` sends them."""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Callable

import numpy as np

from serl_chunk.config.transport import TransportConfig
from serl_chunk.io import format_bytes
from serl_chunk.transport.client.sender import Arrived, Sender
from serl_chunk.transport.client.step_blocks import (
    FIXED_STEP_BYTES,
    MAX_BLOCK_BYTES,
    PackedRecord,
    QueuedRecord,
    make_records,
)
from serl_chunk.transport.sockets import Counters, Rate, Waker
from serl_chunk.transport.storage.journal import JournalError
from serl_chunk.transport.storage.spool import Spool
from serl_chunk.transport.stream import Item
from serl_chunk.transport.wire import records
from serl_chunk.types import Amend, Begin, DataError, End, Record, Step, StepBlock

log = logging.getLogger(__name__)

AWAY = 1.0  # seconds without a learner worth mentioning
MUCH = 16 << 20  # bytes worth mentioning though the learner is there: less is simply on its way


def backlog_line(kept: int, limit: int, episode: int, away: float, stalled: str, *, begun: bool) -> str:
    """For example `learner away for 12 s, spool 34 MiB`; empty where the learner keeps up.

    Args:
        kept: bytes that are not acknowledged.
        limit: bytes that are kept at most; where an episode might exceed it, none begins.
        episode: bytes that the largest episode may take.
        away: seconds since the connection was lost; 0 while there is one.
        stalled: why the learner takes nothing, though it is there.
        begun: an episode is under way, and counted at its largest.
    """
    parts = []
    if away >= AWAY:
        parts.append(f"learner away for {away:.0f} s")
    elif stalled and not away:
        parts.append(f"the learner takes nothing now: {stalled}")
    holding = kept + (2 if begun else 1) * episode > limit
    if parts or holding or kept > max(episode, MUCH):
        parts.append(f"spool {format_bytes(kept)}")
    if holding:
        parts.append("holding after this episode" if begun else "holding until there is room")
    return ", ".join(parts)


_RETRY_S = 1.0  # between attempts to write where the disk is full
_FREE_S = 1.0  # between looks at the disk's room

Spools = Callable[[str], Spool]
"""Opens the spool of a run, given its id."""


class Outbox:
    """A session's outgoing stream.

    The control thread calls `begin`, `step`, `end` and `amend`: each checks the order and appends to a queue. The
    network thread calls the rest. Consecutive steps that wait in the queue travel as one block.
    """

    def __init__(self, config: TransportConfig, spools: Spools | None, largest_episode_bytes: int = 0) -> None:
        """`spools`: None for an outbox that takes no records and writes no files."""
        self.waker = Waker()  # wakes the network thread
        self.stuck = ""  # why the spool takes nothing
        self.sender = Sender(config.credit_bytes, config.timeout_s)
        self.inherited = 0  # records that the spool held when it was opened and that the learner lacked then
        self.counters = Counters("abandoned", "set_aside")
        self.rate = Rate()
        self._spools = spools
        self._spool_bytes = config.spool_bytes
        self._jpeg_quality = config.jpeg_quality
        self._largest_episode = largest_episode_bytes
        self._block_bytes = min(MAX_BLOCK_BYTES, config.max_message_bytes // 4)
        self._queue: collections.deque[QueuedRecord] = collections.deque()
        self._made: collections.deque[PackedRecord] = collections.deque()  # out of the queue, not spooled
        self._episode: str | None = None
        # The spool of the previous run, for the rest of the episode that was open when another run appeared.
        self._former: Spool | None = None
        self._run = self._former_run = ""  # ids of the runs that the spools are of
        self._acting_for = ""  # the run that the control thread's next episode is of
        self._begun_for: collections.deque[str] = collections.deque()  # the run of each Begin that is not spooled
        self._inherited_until = 0  # where the spool ended when it was opened, until a learner reports what it has of it
        self._skipping = False  # the rest of the open episode is dropped
        self._spooled_episode = ""  # open where packing has come to
        # Each counter has a single writer thread, so no lock is needed.
        self._handed = self._packed = 0  # records
        self._handed_steps = self._packed_steps = 0
        self._handed_bytes = self._packed_bytes = 0
        self._retry_at = 0.0
        self._free_at, self._free_bytes = -1e9, 1 << 62

    @property
    def spool(self) -> Spool | None:
        """The spool of the run that the learner belongs to; None before that is known."""
        return self.sender.spool

    # The control thread.

    def act_for(self, run: str) -> None:
        """Episodes that begin from now on are of `run`, whichever run the learner has by then.

        Empty, and so at first: of the run that the learner has when they are spooled.
        """
        self._acting_for = run

    def begin(self, record: Begin) -> None:
        """Open an episode. Raises DataError while another is open."""
        if self._episode is not None:
            raise DataError(
                f"episode {record.episode_id} begins while {self._episode} is open: hand over its End first"
            )
        self._episode = record.episode_id
        self._begun_for.append(self._acting_for)  # before the record: the network thread expects it there
        self._hand_over(record.episode_id, record, 0)

    def step(self, record: Step) -> None:
        """Append a step. Raises DataError where no episode is open."""
        if self._episode is None:
            raise DataError(f"step {record.tick} was handed over outside an episode: hand over a Begin first")
        nbytes = FIXED_STEP_BYTES + record.action.nbytes + sum(v.nbytes for v in record.observation.values())
        if record.decision is not None:
            nbytes += sum(np.asarray(v).nbytes for v in record.decision.values())
        self._handed_steps += 1
        self._hand_over(self._episode, record, nbytes)

    def end(self, record: End) -> None:
        """Close the episode. Raises DataError where it is not the open one."""
        if record.episode_id != self._episode:
            raise DataError(f"the end of episode {record.episode_id} came while {self._episode or 'none'} was open")
        self._episode = None
        self._hand_over(record.episode_id, record, sum(v.nbytes for v in (record.final_observation or {}).values()))

    def amend(self, record: Amend) -> None:
        self._hand_over(record.episode_id, record, 0)

    def _hand_over(self, episode: str, record: Step | Record, nbytes: int) -> None:
        if self._spools is None:
            raise DataError(f"episode {episode}: a link without spools takes no records. Give it spools.")
        # Counted first: `flushed` must not see an empty queue and equal counts while the append is under way.
        self._handed += 1
        self._handed_bytes += nbytes
        self._queue.append((episode, record, nbytes))
        self.waker.wake()

    # Any thread.

    @property
    def kept_bytes(self) -> int:
        """Bytes the learner has not acknowledged, queued ones included."""
        spooled = 0 if self.spool is None else self.spool.unacked_bytes
        return spooled + self._handed_bytes - self._packed_bytes

    @property
    def steps_recorded(self) -> int:
        """Steps of the session. Momentarily too many while a block moves from the queue into the spool."""
        spooled = 0 if self.spool is None else self.spool.steps
        return spooled + self._handed_steps - self._packed_steps

    def no_room(self) -> str:
        """Why no episode should begin; empty where one may. An episode that begins has room to the end."""
        kept, spool = self.kept_bytes, self.spool
        if self.stuck:
            return f"{self.stuck}; {kept >> 20} MiB wait in memory"
        if kept >= self._spool_bytes or kept + self._largest_episode > self._spool_bytes:
            return (
                f"{kept >> 20} MiB of records wait for the learner and the next episode may take "
                f"{self._largest_episode >> 20} MiB; transport.spool_bytes={self._spool_bytes} is all that is kept"
            )
        now = time.monotonic()
        if spool is not None and now - self._free_at > _FREE_S:
            self._free_at, self._free_bytes = now, spool.free_bytes()
        if self._free_bytes < 2 * self._largest_episode:
            return f"the disk of the spool has {self._free_bytes >> 20} MiB left: make room"
        return ""

    @property
    def flushed(self) -> bool:
        """Whether the learner has everything that was handed over."""
        return self._handed == self._packed and (self.spool is None or self.spool.acked == self.spool.next)

    def stats(self) -> dict[str, float]:
        spool = self.spool
        return {
            "retransmitted": self.sender.retransmitted,
            **self.counters,
            "steps_recorded": self.steps_recorded,
            "steps_per_s": self.rate.per_second(),
            "queued": self._handed - self._packed,
            "inherited": self.inherited,
            "unacked_records": 0 if spool is None else spool.next - spool.acked,
            "unacked_bytes": self.kept_bytes,
            "spool_bytes": 0 if spool is None else spool.nbytes,
            "in_flight_bytes": self.sender.in_flight_bytes,
            "incarnation": 0 if spool is None else spool.incarnation,
        }

    # The network thread.

    def attach(self, run: str) -> None:
        """What is handed over goes into the spool of `run` from the next episode on, and what it holds is sent.

        The rest of an episode that is open now belongs to the previous run: it follows its beginning.
        """
        if self._spools is None:
            return
        old, old_run, self._run = self.spool, self._run, run
        if self._former is not None and run == self._former_run:  # back at the run that the open episode is of
            self.sender.take(self._former)
            self._former = None
        else:
            spool = self._spools(run)
            self._inherited_until = spool.next
            self.sender.take(spool)
            if old is None:
                return
            if self._former is None:
                self._former, self._former_run = old, old_run
                while self._queue and not self.stuck:
                    self.pack()
                if not self._spooled_episode and self._former is not None:
                    self._set_aside()
                return
        assert old is not None
        old.close()  # of a third run within one episode: it got nothing of that

    def renew(self) -> None:
        """The learner has all that the spool holds, and more: go on with an empty one."""
        spool = self.spool
        assert spool is not None
        assert self._spools is not None
        spool.acknowledge(spool.next)
        spool.close()
        self._skipping = bool(self._spooled_episode) and self._former is None
        self.sender.take(self._spools(self._run))

    def _set_aside(self) -> None:
        former, self._former = self._former, None
        assert former is not None
        self.counters["set_aside"] += former.next - former.acked
        if former.next > former.acked:
            log.warning("%d records of another run stay in their spool, for that run", former.next - former.acked)
        former.close()

    @property
    def can_pack(self) -> bool:
        if self.spool is None or not (self._queue or self._made):
            return False
        return not self.stuck or time.monotonic() >= self._retry_at

    def pack(self) -> None:
        """Move some of what was handed over into the spool. Raises WireError for a value that cannot be sent."""
        if not self.can_pack:
            return
        if self._write():
            make_records(self._queue, self._made, self._block_bytes)
            self._write()

    def _write(self) -> bool:
        """Spool what was made; False where the disk takes no more. Then nothing is lost, and it is tried again."""
        while self._made:
            record, nbytes, items = self._made[0]
            if isinstance(record, Begin):
                self._open_for(self._begun_for[0])
            spool = self._former or self.spool
            assert spool is not None
            if not self._skipping:
                item = Item.of(record, spool.next)
                frames = records.encode_record(record, item.first, jpeg_quality=self._jpeg_quality)
                try:
                    spool.append(item, frames)
                except JournalError as e:
                    if not self.stuck:
                        log.error("%s: records are kept in memory until it can be written again", e)
                    self.stuck, self._retry_at = str(e), time.monotonic() + _RETRY_S
                    return False
            else:
                self.counters["abandoned"] += items
            self.stuck = ""
            self._made.popleft()
            self._account(record, nbytes, items)
        return True

    def _open_for(self, run: str) -> None:
        """The next episode goes into the spool of `run`, also where the learner has become another one's since."""
        current = run in ("", self._run)
        if self._former is not None and (current or run != self._former_run):
            self._set_aside()
        self._skipping = False
        if not current and self._former is None:
            assert self._spools is not None
            self._former, self._former_run = self._spools(run), run

    def _account(self, record: Record, nbytes: int, items: int) -> None:
        if isinstance(record, Begin):
            self._begun_for.popleft()
            self._spooled_episode = record.episode_id
        elif isinstance(record, End):
            self._spooled_episode = ""
        elif isinstance(record, StepBlock):
            self._packed_steps += record.n
            self.rate.add(record.n)
        self._packed_bytes += nbytes
        self._packed += items

    def connected(self, *, known: bool, seq: int, arrived: Arrived) -> None:
        """A connection began: continue at `seq`, or from the beginning of what is kept where nothing is known.

        `arrived`: where to continue in a record that was sent in parts.
        """
        spool = self.spool
        if spool is None:
            return
        if known:
            if seq < spool.acked:  # its disk lost the newest of what it had acknowledged
                log.warning("the learner lost records that it had acknowledged: what is kept of them is sent again")
                spool.rewind()
            spool.acknowledge(seq)
        else:
            if spool.acked > spool.first:
                log.info("the learner does not know this session: resending what is kept of it")
            spool.rewind()
        self.inherited += max(0, self._inherited_until - spool.acked)
        self._inherited_until = 0
        self.sender.restart(arrived)

    def retire(self) -> int | None:
        """End the session where the learner has all of it. Returns its number of records, None where it goes on."""
        spool = self.spool
        if spool is None:
            return 0 if self._spools is None else None
        return spool.next if self.flushed and spool.retire() else None

    def close(self) -> None:
        """Release the spools; what is not acknowledged stays in them."""
        for spool in (self._former, self.spool):
            if spool is not None:
                spool.close()

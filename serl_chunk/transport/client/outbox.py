"""An actor's outgoing records: queued, packed, spooled and sent."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import zmq

from serl_chunk.config.transport import TransportConfig
from serl_chunk.transport.client.flow import Flow, Sent
from serl_chunk.transport.storage import journal
from serl_chunk.transport.storage.journal import JournalError
from serl_chunk.transport.storage.spool import Kept, Spool
from serl_chunk.transport.wire import records
from serl_chunk.transport.wire.handshake import CREDIT_BYTES, Counters
from serl_chunk.transport.wire.records import (
    MAX_BLOCK_BYTES,
    MAX_PART_BYTES,
    Item,
    PackedRecord,
    QueuedRecord,
    encode_part,
)
from serl_chunk.types import Amend, Begin, DataError, End, Record, Step, StepBlock
from serl_chunk_robot.wire import codec
from serl_chunk_robot.wire.sockets import Waker, try_send

log = logging.getLogger(__name__)

_RETRY_S = 1.0  # between attempts to write to a full disk, and between looks at its room


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


class Sender:
    """Sends a spool's entries in order, at most CREDIT_BYTES of them unacknowledged. For the network thread.

    What the link does not carry at once travels in parts.
    """

    def __init__(self, timeout_s: float) -> None:
        self.spool: Spool | None = None
        self.blocked = False  # the socket took no more; poll it for writing
        self._unreadable = False  # the spool gives nothing back
        self.retransmitted = 0  # records
        self.progress_at = time.monotonic()  # when the learner last received something, or nothing was in flight
        self.in_flight_bytes = 0  # not acknowledged
        self.flow = Flow(most=CREDIT_BYTES, largest=MAX_PART_BYTES, timeout_s=timeout_s)
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
            if not self._offset and self._in_flight and self.in_flight_bytes + disk_bytes > CREDIT_BYTES:
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
        while self._on_way:
            message = self._on_way[0]
            if message.end > arrived.seq and (message.first != arrived.first or message.reach > arrived.nbytes):
                break
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


Spools = Callable[[str], Spool]  # opens the spool of a run, given its id


class RunSpools:
    """The open spools: of the learner's run, which the sender sends, and of the run that an episode began in.

    An episode goes on in the spool that it began in. Without `spools` there are no files. For the network thread.
    """

    def __init__(self, spools: Spools | None, sender: Sender) -> None:
        self.inherited = 0  # records that the spool held when it was opened and that the learner lacked then
        self.counters = Counters(abandoned=0, set_aside=0)
        self.spools, self._sender = spools, sender
        self._open: dict[str, Spool] = {}  # by run
        self._run = self._written = ""  # runs whose spools are sent, and written to
        self._inherited_until = 0  # where the spool ended when it was opened, until a learner reports what it has of it
        self._skipping = False  # the rest of the open episode is dropped
        self._episode = ""  # open where packing has come to

    def _spool(self, run: str) -> Spool:
        assert self.spools is not None
        if run not in self._open:
            self._open[run] = self.spools(run)
        return self._open[run]

    def attach(self, run: str) -> None:
        """Send the spool of `run`. What was handed over before is still written to the previous one, up to `settle`."""
        known, spool = run in self._open, self._spool(run)
        self._run, self._written = run, self._written or run
        if not known:
            self._inherited_until = spool.next
        self._sender.take(spool)

    def settle(self) -> None:
        """Part with the spools that are neither sent nor those of an open episode."""
        if not self._episode:
            self._written = self._run
        self._part()

    def _part(self) -> None:
        for run in self._open.keys() - {self._run, self._written}:
            spool = self._open.pop(run)
            if left := spool.next - spool.acked:
                self.counters["set_aside"] += left
                log.warning("%d records of another run stay in their spool, for that run", left)
            spool.close()

    def renew(self) -> None:
        """Replace the spool by an empty one: the learner has all that it holds, and more."""
        spool = self._open.pop(self._run)
        spool.acknowledge(spool.next)
        spool.close()
        self._skipping = bool(self._episode) and self._written == self._run
        self._sender.take(self._spool(self._run))

    def begin_for(self, run: str) -> None:
        """Direct the next episode into the spool of `run`, also where the learner's run has changed since."""
        self._written, self._skipping = run or self._run, False
        self._spool(self._written)
        self._part()

    def target(self) -> Spool | None:
        """Return the spool that the next record goes to; None where it is dropped."""
        return None if self._skipping else self._open[self._written]

    def passed(self, record: Record, items: int) -> None:
        """Note that a record, of so many that were handed over, went to the `target`."""
        self.counters["abandoned"] += items if self._skipping else 0
        if isinstance(record, Begin):
            self._episode = record.episode_id
        elif isinstance(record, End):
            self._episode = ""

    def connected(self, spool: Spool) -> None:
        """Note that a learner has said what it has of the current spool."""
        self.inherited += max(0, self._inherited_until - spool.acked)
        self._inherited_until = 0

    def close(self) -> None:
        for spool in self._open.values():
            spool.close()


@dataclasses.dataclass
class Counts:
    """What has passed one end of the queue. A single thread writes it, so no lock is needed."""

    records: int = 0
    steps: int = 0
    nbytes: int = 0


class RecordQueue:
    """A queue that the control thread fills; the network thread takes its records out, consecutive steps as blocks.

    The byte and step counts cover what was taken out only once it is spooled (`pop`).
    """

    def __init__(self) -> None:
        self.queue: deque[QueuedRecord] = deque()
        self.made: deque[PackedRecord] = deque()  # out of the queue, not spooled
        self.begun_for: deque[str] = deque()  # the run of each Begin that is not spooled
        self._handed, self._packed = Counts(), Counts()

    # The control thread.

    def put(self, episode: str, record: Step | Record, nbytes: int) -> None:
        # Counted first: `Outbox.flushed` must not see an empty queue and equal counts while the append is under way.
        if isinstance(record, Step):
            self._handed.steps += 1
        self._handed.records += 1
        self._handed.nbytes += nbytes
        self.queue.append((episode, record, nbytes))

    # Any thread.

    def __len__(self) -> int:
        """Records that are not spooled."""
        return self._handed.records - self._packed.records

    @property
    def steps(self) -> int:
        return self._handed.steps - self._packed.steps

    @property
    def nbytes(self) -> int:
        return self._handed.nbytes - self._packed.nbytes

    # The network thread.

    def pop(self) -> None:
        """Count the oldest packed record as spooled."""
        record, nbytes, items = self.made.popleft()
        if isinstance(record, Begin):
            self.begun_for.popleft()
        elif isinstance(record, StepBlock):
            self._packed.steps += record.n
        self._packed.nbytes += nbytes
        self._packed.records += items


class Outbox:
    """A session's outgoing stream: a queue that the control thread fills, a spool that the network thread sends.

    Consecutive steps that wait in the queue travel as one block. Without `spools` there are no records and no files.
    """

    def __init__(self, config: TransportConfig, spools: Spools | None, largest_episode_bytes: int = 0) -> None:
        self.waker = Waker()  # wakes the network thread
        self.stuck = ""  # why the spool takes nothing
        self.note = ""  # id of the episode that a later process is to discard (`Spool.note_discard`)
        self.sender = Sender(config.timeout_s)
        self.runs = RunSpools(spools, self.sender)
        self.largest_episode, self._spool_bytes = largest_episode_bytes, config.spool_bytes
        self._free_at, self._free_bytes = -1e9, 1 << 62  # of the spool's disk
        self._jpeg_quality = config.jpeg_quality
        self._block_bytes = min(MAX_BLOCK_BYTES, config.max_message_bytes // 4)
        self._queue = RecordQueue()
        self._episode: str | None = None
        self._acting_for = ""  # the run that the control thread's next episode is of
        self._retry_at = 0.0

    @property
    def spool(self) -> Spool | None:  # of the learner's run; None before that is known
        return self.sender.spool

    # The control thread.

    def act_for(self, run: str) -> None:
        """Assign the next episodes to `run`; empty (the default): to the learner's run when they are spooled."""
        self._acting_for = run

    def begin(self, record: Begin) -> None:
        if self._episode is not None:
            raise DataError(
                f"episode {record.episode_id} begins while {self._episode} is open: hand over its End first"
            )
        self._episode = record.episode_id
        self._queue.begun_for.append(self._acting_for)  # first: the network thread expects it there
        self._hand_over(record.episode_id, record, 0)

    def step(self, record: Step) -> None:
        if self._episode is None:
            raise DataError(f"step {record.tick} was handed over outside an episode: hand over a Begin first")
        self._hand_over(self._episode, record, records.step_bytes(record), wakes=False)

    def end(self, record: End) -> None:
        if record.episode_id != self._episode:
            raise DataError(f"the end of episode {record.episode_id} came while {self._episode or 'none'} was open")
        self._episode = None
        self._hand_over(record.episode_id, record, sum(v.nbytes for v in (record.final_observation or {}).values()))

    def amend(self, record: Amend) -> None:
        self._hand_over(record.episode_id, record, 0)

    def _hand_over(self, episode: str, record: Step | Record, nbytes: int, *, wakes: bool = True) -> None:
        if self.runs.spools is None:
            raise DataError(f"episode {episode}: a link without spools takes no records. Give it spools.")
        self._queue.put(episode, record, nbytes)
        if wakes:
            self.waker.wake()

    # Any thread.

    @property
    def kept_bytes(self) -> int:  # not acknowledged, queued ones included
        return (self.spool.unacked_bytes if self.spool else 0) + self._queue.nbytes

    @property
    def steps_recorded(self) -> int:
        """Steps of the session; briefly too many while a block moves from the queue into the spool."""
        return (self.spool.steps if self.spool else 0) + self._queue.steps

    def no_room(self) -> str:
        """Why no episode should begin; empty where one may. An episode that begins has room to the end."""
        kept = self.kept_bytes
        if self.stuck:
            return f"{self.stuck}; {kept >> 20} MiB wait in memory"
        if kept >= self._spool_bytes or kept + self.largest_episode > self._spool_bytes:
            return (
                f"{kept >> 20} MiB of records wait for the learner and the next episode may take "
                f"{self.largest_episode >> 20} MiB; transport.spool_bytes={self._spool_bytes} is all that is kept"
            )
        now = time.monotonic()
        if self.spool is not None and now - self._free_at > _RETRY_S:
            self._free_at, self._free_bytes = now, journal.free_bytes(self.spool.folder)
        if self._free_bytes < 2 * self.largest_episode:
            return f"the disk of the spool has {self._free_bytes >> 20} MiB left: make room"
        return ""

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def unacknowledged(self) -> int:
        """Records that the learner lacks."""
        spool = self.spool
        return self.queued + (0 if spool is None else spool.next - spool.acked)

    @property
    def flushed(self) -> bool:
        return not self.queued and (self.spool is None or self.spool.acked == self.spool.next)

    # The network thread.

    def attach(self, run: str) -> None:
        """Send the spool of `run`, and write to it from the next episode on: the open one continues in its spool."""
        if self.runs.spools is not None:
            self.runs.attach(run)
            while self._queue.queue and not self.stuck:
                self.pack()
            self.runs.settle()

    @property
    def can_pack(self) -> bool:
        waiting = self.spool is not None and bool(self._queue.queue or self._queue.made)
        return waiting and (not self.stuck or time.monotonic() >= self._retry_at)

    def pack(self) -> None:
        """Move some of the queue into the spool. Raises WireError for a value that cannot be sent."""
        if self.can_pack and self._write():
            records.pack_steps(self._queue.queue, self._queue.made, self._block_bytes)
            self._write()
        if self.spool is not None and not self.queued:  # after the records that were handed over before it
            self.spool.note_discard(self.note)

    def _write(self) -> bool:
        """Spool what was packed; False where the disk is full: nothing is lost, and it is tried again."""
        while self._queue.made:
            record, _, items = self._queue.made[0]
            if isinstance(record, Begin):
                self.runs.begin_for(self._queue.begun_for[0])
            if (spool := self.runs.target()) is not None:
                item = Item.of(record, spool.next)
                frames = records.encode_record(record, item.first, jpeg_quality=self._jpeg_quality)
                try:
                    spool.append(item, frames)
                except JournalError as e:
                    if not self.stuck:
                        log.error("%s: records are kept in memory until it can be written again", e)
                    self.stuck, self._retry_at = str(e), time.monotonic() + _RETRY_S
                    return False
            self.stuck = ""
            self.runs.passed(record, items)
            self._queue.pop()
        return True

    def connected(self, *, known: bool, seq: int, arrived: Arrived) -> None:
        """Continue at `seq` and `arrived`, or at the first kept record where the session is not `known`."""
        if (spool := self.spool) is None:
            return
        if known:
            if seq < spool.acked:  # its disk lost the newest of what it had acknowledged
                log.warning("the learner lost records that it had acknowledged: resending what is kept of them")
                spool.rewind()
            spool.acknowledge(seq)
        else:
            if spool.acked > spool.first:
                log.info("the learner does not know this session: resending what is kept of it")
            spool.rewind()
        self.runs.connected(spool)
        self.sender.restart(arrived)

    def retire(self) -> int | None:
        """End the session where the learner has all of it. Returns its number of records, None where it continues."""
        if (spool := self.spool) is None:
            return 0 if self.runs.spools is None else None
        return spool.next if self.flushed and not spool.noted and spool.retire() else None

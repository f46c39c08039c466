"""An actor's outgoing records: queued, packed, spooled and sent."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import deque

from serl_chunk.config.transport import TransportConfig
from serl_chunk.transport.client.run_spools import RunSpools, Spools
from serl_chunk.transport.client.sender import Arrived, Sender
from serl_chunk.transport.storage import files
from serl_chunk.transport.storage.journal import JournalError
from serl_chunk.transport.storage.spool import Spool
from serl_chunk.transport.wire import records
from serl_chunk.transport.wire.records import MAX_BLOCK_BYTES, Item, PackedRecord, QueuedRecord
from serl_chunk.types import Amend, Begin, DataError, End, Record, Step, StepBlock
from serl_chunk_robot.wire.sockets import Waker

log = logging.getLogger(__name__)

_RETRY_S = 1.0  # between attempts to write to a full disk, and between looks at its room


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

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._queue: deque[QueuedRecord] = deque()
        self._made: deque[PackedRecord] = deque()  # out of the queue, not spooled
        self._begun_for: deque[str] = deque()  # the run of each Begin that is not spooled
        self._handed, self._packed = Counts(), Counts()

    # The control thread.

    def put(self, episode: str, record: Step | Record, nbytes: int) -> None:
        # Counted first: `Outbox.flushed` must not see an empty queue and equal counts while the append is under way.
        if isinstance(record, Step):
            self._handed.steps += 1
        self._handed.records += 1
        self._handed.nbytes += nbytes
        self._queue.append((episode, record, nbytes))

    def begin_for(self, run: str) -> None:
        """Name the run of the Begin that is put next: the network thread expects it there."""
        self._begun_for.append(run)

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

    @property
    def waiting(self) -> bool:
        return bool(self._queue or self._made)

    @property
    def unpacked(self) -> bool:
        return bool(self._queue)

    def pack(self) -> None:
        records.pack_steps(self._queue, self._made, self._block_bytes)

    def first(self) -> PackedRecord | None:
        """Return the oldest packed record."""
        return self._made[0] if self._made else None

    @property
    def first_run(self) -> str:
        """The run of the oldest Begin."""
        return self._begun_for[0]

    def pop(self) -> None:
        """Count the oldest packed record as spooled."""
        record, nbytes, items = self._made.popleft()
        if isinstance(record, Begin):
            self._begun_for.popleft()
        elif isinstance(record, StepBlock):
            self._packed.steps += record.n
        self._packed.nbytes += nbytes
        self._packed.records += items


class SpoolRoom:
    """The room for records that an actor keeps: of `spool_bytes` in all, and on the disk. For the control thread."""

    def __init__(self, spool_bytes: int, largest_episode: int) -> None:
        self.largest_episode = largest_episode
        self._spool_bytes = spool_bytes
        self._free_at, self._free_bytes = -1e9, 1 << 62

    def lack(self, kept: int, spool: Spool | None) -> str:
        """Return why an episode has no room beside `kept` bytes; empty where it has."""
        if kept >= self._spool_bytes or kept + self.largest_episode > self._spool_bytes:
            return (
                f"{kept >> 20} MiB of records wait for the learner and the next episode may take "
                f"{self.largest_episode >> 20} MiB; transport.spool_bytes={self._spool_bytes} is all that is kept"
            )
        now = time.monotonic()
        if spool is not None and now - self._free_at > _RETRY_S:
            self._free_at, self._free_bytes = now, files.free_bytes(spool.folder)
        if self._free_bytes < 2 * self.largest_episode:
            return f"the disk of the spool has {self._free_bytes >> 20} MiB left: make room"
        return ""


class Outbox:
    """A session's outgoing stream: a queue that the control thread fills, a spool that the network thread sends.

    Consecutive steps that wait in the queue travel as one block. Without `spools` there are no records and no files.
    """

    def __init__(self, config: TransportConfig, spools: Spools | None, largest_episode_bytes: int = 0) -> None:
        self.waker = Waker()  # wakes the network thread
        self.stuck = ""  # why the spool takes nothing
        self.note = ""  # id of the episode that a later process is to discard (`Spool.note_discard`)
        self.sender = Sender(config.credit_bytes, config.timeout_s)
        self.runs = RunSpools(spools, self.sender)
        self.room = SpoolRoom(config.spool_bytes, largest_episode_bytes)
        self._jpeg_quality = config.jpeg_quality
        self._queue = RecordQueue(min(MAX_BLOCK_BYTES, config.max_message_bytes // 4))
        self._episode: str | None = None
        self._acting_for = ""  # the run that the control thread's next episode is of
        self._retry_at = 0.0

    @property
    def spool(self) -> Spool | None:  # of the learner's run; None before that is known
        return self.runs.current

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
        self._queue.begin_for(self._acting_for)
        self._hand_over(record.episode_id, record, 0)

    def step(self, record: Step) -> None:
        if self._episode is None:
            raise DataError(f"step {record.tick} was handed over outside an episode: hand over a Begin first")
        self._hand_over(self._episode, record, records.step_bytes(record))

    def end(self, record: End) -> None:
        if record.episode_id != self._episode:
            raise DataError(f"the end of episode {record.episode_id} came while {self._episode or 'none'} was open")
        self._episode = None
        self._hand_over(record.episode_id, record, sum(v.nbytes for v in (record.final_observation or {}).values()))

    def amend(self, record: Amend) -> None:
        self._hand_over(record.episode_id, record, 0)

    def _hand_over(self, episode: str, record: Step | Record, nbytes: int) -> None:
        if self.runs.absent:
            raise DataError(f"episode {episode}: a link without spools takes no records. Give it spools.")
        self._queue.put(episode, record, nbytes)
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
        return self.room.lack(kept, self.spool)

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def flushed(self) -> bool:
        return not self.queued and (self.spool is None or self.spool.acked == self.spool.next)

    # The network thread.

    def attach(self, run: str) -> None:
        """Send the spool of `run`, and write to it from the next episode on: the open one continues in its spool."""
        if self.runs.attach(run):
            while self._queue.unpacked and not self.stuck:
                self.pack()
            self.runs.settle()

    @property
    def can_pack(self) -> bool:
        waiting = self.spool is not None and self._queue.waiting
        return waiting and (not self.stuck or time.monotonic() >= self._retry_at)

    def pack(self) -> None:
        """Move some of the queue into the spool. Raises WireError for a value that cannot be sent."""
        if self.can_pack and self._write():
            self._queue.pack()
            self._write()
        if self.spool is not None and not self.queued:  # after the records that were handed over before it
            self.spool.note_discard(self.note)

    def _write(self) -> bool:
        """Spool what was packed; False where the disk is full: nothing is lost, and it is tried again."""
        while (packed := self._queue.first()) is not None:
            record, _, items = packed
            if isinstance(record, Begin):
                self.runs.begin_for(self._queue.first_run)
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
            return 0 if self.runs.absent else None
        return spool.next if self.flushed and not spool.noted and spool.retire() else None

    def close(self) -> None:
        self.runs.close()

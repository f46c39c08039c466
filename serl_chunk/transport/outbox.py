"""The actor's records on their way out: handed over, packed, spooled, sent within a credit, acknowledged."""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import zmq

from serl_chunk.transport import records, wire
from serl_chunk.transport.journal import JournalError
from serl_chunk.transport.sockets import try_send
from serl_chunk.transport.spool import Entry, Spool
from serl_chunk.transport.stats import Counters, Rate
from serl_chunk.types import (
    DECISION_PREFIX,
    IMAGE_PREFIX,
    STEP_COLUMNS,
    Amend,
    Begin,
    DataError,
    End,
    Record,
    SparseRows,
    Step,
    StepBlock,
)

log = logging.getLogger(__name__)

_MAX_BLOCK_STEPS = 512
_MAX_BLOCK_BYTES = (
    1 << 20
)  # measured with camera rows: more means fresh memory pages for every block, less means more calls
_TURN_BYTES = 4 * _MAX_BLOCK_BYTES  # packed at a time, so that sending and heartbeats get their turn
_TURN_RECORDS = 256  # the same for small ones: each takes some 50 us to pack and send
_FIXED_STEP_BYTES = 64  # of a step beside its arrays, rounded up
_RETRY_S = 1.0  # between attempts to write where the disk is full

Spools = Callable[[str], Spool]
"""Opens the spool of a run, given its id."""


class Outbox:
    """A session's outgoing stream.

    The control thread calls `begin`, `step`, `end` and `amend`: each checks the order and appends to a queue. The
    network thread calls the rest. Consecutive steps that wait in the queue travel as one block.
    """

    def __init__(
        self,
        *,
        credit_bytes: int,
        spool_bytes: int,
        max_message_bytes: int,
        largest_episode_bytes: int = 0,
        jpeg_quality: int = 0,
    ) -> None:
        self.spool: Spool | None = None  # of the run the learner belongs to; None before it is known
        self.blocked = False  # the socket took no more; poll it for writing
        self.stuck = ""  # why the spool takes nothing
        self.unreadable = ""  # why it gives nothing back
        self.counters = Counters("retransmitted", "abandoned", "set_aside")
        self.rate = Rate()
        self.progress_at = time.monotonic()  # when the learner last acknowledged, or nothing was in flight
        self._credit = credit_bytes
        self._spool_bytes = spool_bytes
        self._jpeg_quality = jpeg_quality
        self._largest_episode = largest_episode_bytes
        self._block_bytes = min(_MAX_BLOCK_BYTES, max_message_bytes // 4)
        self._queue: collections.deque[tuple[str, Step | Record, int]] = collections.deque()
        self._made: collections.deque[tuple[Record, int, int]] = collections.deque()  # out of the queue, not spooled
        self._episode: str | None = None
        # The spool of the run before, for the rest of the episode that was open when another run appeared; or a
        # word that this rest goes nowhere, because memory was all that held the beginning.
        self._former: Spool | None = None
        self._run = self._former_run = ""  # ids of the runs that the spools are of
        self._skipping = False
        self._spooled_episode = ""  # open where packing has come to
        # Each of these pairs is written by one thread each, and so needs no lock.
        self._handed = self._packed = 0  # records
        self._handed_steps = self._packed_steps = 0
        self._handed_bytes = self._packed_bytes = 0
        self._in_flight: collections.deque[tuple[int, int]] = collections.deque()  # (end, nbytes) of each message sent
        self._in_flight_bytes = 0
        self._send_next = self._sent_once = 0
        self._retry_at = 0.0
        self._free_at, self._free_bytes = -1e9, 1 << 62

    # The control thread.

    def begin(self, record: Begin) -> None:
        """Open an episode. Raises DataError while another is open."""
        if self._episode is not None:
            raise DataError(
                f"episode {record.episode_id} begins while {self._episode} is open: hand over its End first"
            )
        self._episode = record.episode_id
        self._hand_over(record.episode_id, record, 0)

    def step(self, record: Step) -> None:
        """Append a step. Raises DataError where no episode is open."""
        if self._episode is None:
            raise DataError(f"step {record.tick} was handed over outside an episode: hand over a Begin first")
        nbytes = _FIXED_STEP_BYTES + record.action.nbytes + sum(v.nbytes for v in record.observation.values())
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
        """Correct a closed episode."""
        self._hand_over(record.episode_id, record, 0)

    def _hand_over(self, episode: str, record: Step | Record, nbytes: int) -> None:
        # Counted first: `flushed` must not see an empty queue and equal counts while the append is under way.
        self._handed += 1
        self._handed_bytes += nbytes
        self._queue.append((episode, record, nbytes))

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
        if spool is not None and spool.durable:
            free = self._room(spool)
            if free < 2 * self._largest_episode:
                return f"the disk of the spool has {free >> 20} MiB left: make room"
        return ""

    def _room(self, spool: Spool) -> int:
        """Free bytes on the disk, looked at once a second."""
        now = time.monotonic()
        if now - self._free_at > 1.0:
            self._free_at, self._free_bytes = now, spool.free_bytes()
        return self._free_bytes

    @property
    def flushed(self) -> bool:
        """Whether the learner has everything that was handed over."""
        return self._handed == self._packed and (self.spool is None or self.spool.acked == self.spool.next)

    def stats(self) -> dict[str, float]:
        """Counts and sizes."""
        spool = self.spool
        return {
            **self.counters,
            "steps_recorded": self.steps_recorded,
            "steps_per_s": self.rate.per_second(),
            "queued": self._handed - self._packed,
            "unacked_records": 0 if spool is None else spool.next - spool.acked,
            "unacked_bytes": self.kept_bytes,
            "spool_bytes": 0 if spool is None else spool.nbytes,
            "in_flight_bytes": self._in_flight_bytes,
            "incarnation": 0 if spool is None else spool.incarnation,
        }

    # The network thread.

    def attach(self, spools: Spools, run: str) -> None:
        """What is handed over goes into the spool of `run` from the next episode on, and what it holds is sent.

        The rest of an episode that is open now belongs to the run before: it follows its beginning.
        """
        if self._former is not None and run == self._former_run:  # back at the run that the open episode is of
            assert self.spool is not None
            other, self.spool, self._former = self.spool, self._former, None
            other.close()
            self._sending(run)
            return
        old, old_run = self.spool, self._run
        self.spool = spools(run)
        self._sending(run)
        if old is None:
            return
        if self._former is not None:  # a third run within one episode: the second got nothing of it
            old.close()
            return
        if old.durable:
            self._former, self._former_run = old, old_run
            while self._queue and not self.stuck:
                self.pack()
        else:
            lost = old.next - old.acked + self._drop_queue()
            self.counters["abandoned"] += lost
            log.warning("the learner runs another run: %d unacknowledged records of the last one are dropped", lost)
        self._skipping = bool(self._spooled_episode) and not old.durable
        if not self._spooled_episode and self._former is not None:
            self._set_aside()

    def _sending(self, run: str) -> None:
        assert self.spool is not None
        self._run = run
        self._send_next = self._sent_once = self.spool.acked
        self._restart()

    def renew(self, spools: Spools, run: str) -> None:
        """The learner has all that the spool holds, and more: go on with an empty one."""
        if self.spool is not None:
            self.spool.acknowledge(self.spool.next)
            self.spool.close()
        self._skipping = bool(self._spooled_episode) and self._former is None
        self.spool = spools(run)
        self._restart()
        self._sent_once = self._send_next

    def _set_aside(self) -> None:
        former, self._former = self._former, None
        assert former is not None
        self.counters["set_aside"] += former.next - former.acked
        if former.next > former.acked:
            log.warning("%d records of another run stay in their spool, for that run", former.next - former.acked)
        former.close()

    @property
    def can_pack(self) -> bool:
        """Whether `pack` has something to do.

        A spool on disk takes everything at once: what is in it survives this process. What memory cannot send yet
        stays in the queue, uncopied: packing it early would cost fresh memory for every row.
        """
        if self.spool is None or not (self._queue or self._made):
            return False
        if self.stuck and time.monotonic() < self._retry_at:
            return False
        return self.spool.durable or self.spool.unacked_bytes - self._in_flight_bytes < _TURN_BYTES

    def pack(self) -> None:
        """Move some of what was handed over into the spool. Raises WireError for a value that cannot be sent."""
        if not self.can_pack:
            return
        if self._write():
            self._fill()
            self._write()

    def _fill(self) -> None:
        """Make records of what is in the queue; consecutive steps become a block."""
        block: list[Step] = []
        block_bytes, block_episode, shapes = 0, "", _Shapes()
        moved = 0

        def finish() -> None:
            nonlocal block, block_bytes
            if block:
                self._made.append((_to_block(block_episode, block), block_bytes, len(block)))
                block, block_bytes = [], 0

        while self._queue and moved < _TURN_BYTES and len(self._made) < _TURN_RECORDS:
            episode, record, nbytes = self._queue.popleft()
            moved += nbytes + _FIXED_STEP_BYTES
            if not isinstance(record, Step):
                finish()
                self._made.append((record, nbytes, 1))
                continue
            if block and (
                episode != block_episode
                or record.tick != block[-1].tick + 1
                or len(block) == _MAX_BLOCK_STEPS
                or block_bytes + nbytes > self._block_bytes
                or not shapes.fit(record)
            ):
                finish()
            if not block:
                shapes = _Shapes()
                shapes.fit(record)
            block.append(record)
            block_bytes, block_episode = block_bytes + nbytes, episode
        finish()

    def _write(self) -> bool:
        """Spool what was made; False where the disk takes no more. Then nothing is lost, and it is tried again."""
        while self._made:
            record, nbytes, items = self._made[0]
            if isinstance(record, Begin):
                self._skipping = False
                if self._former is not None:
                    self._set_aside()
            spool = self._former or self.spool
            assert spool is not None
            if not self._skipping:
                frames = records.encode_record(record, spool.next, jpeg_quality=self._jpeg_quality)
                try:
                    spool.append(records.kind_of(record), records.count_of(record), frames, wire.size_of(frames))
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

    def _account(self, record: Record, nbytes: int, items: int) -> None:
        if isinstance(record, Begin):
            self._spooled_episode = record.episode_id
        elif isinstance(record, End):
            self._spooled_episode = ""
        elif isinstance(record, StepBlock):
            self._packed_steps += record.n
            self.rate.add(record.n)
        self._packed_bytes += nbytes
        self._packed += items

    def pump(self, socket: zmq.Socket[bytes], token: bytes) -> None:
        """Send what the credit and the socket take."""
        self.blocked = False
        if not self._in_flight:
            self.progress_at = time.monotonic()
        while self.spool is not None and (entry := self._next_entry(self.spool)) is not None:
            if self._in_flight and self._in_flight_bytes + entry.nbytes > self._credit:
                return
            if not try_send(socket, [token, *entry.frames]):
                self.blocked = True
                return
            self._send_next = entry.end
            if entry.end <= self._sent_once:
                self.counters["retransmitted"] += entry.span
            self._sent_once = max(self._sent_once, entry.end)
            self._in_flight.append((entry.end, entry.nbytes))
            self._in_flight_bytes += entry.nbytes

    def _next_entry(self, spool: Spool) -> Entry | None:
        """What is to be sent next; None where there is nothing, or the disk does not give it back now."""
        try:
            entry = spool.at(self._send_next)
        except JournalError as e:
            if not self.unreadable:
                log.error("%s: it is tried again", e)
            self.unreadable = str(e)
            return None
        self.unreadable = ""
        return entry

    def acknowledged(self, seq: int, *, gap: bool) -> None:
        """The learner has everything below `seq`; with `gap`, it asks for what follows `seq` again."""
        if self.spool is None:
            return
        if self.spool.acknowledge(min(seq, self.spool.next)):
            self.progress_at = time.monotonic()
        if gap:
            self._restart()
        while self._in_flight and self._in_flight[0][0] <= self.spool.acked:
            self._in_flight_bytes -= self._in_flight.popleft()[1]

    def wait(self) -> None:
        """The learner cannot take anything now, and says so: what is in flight is not late."""
        self.progress_at = time.monotonic()

    def connected(self, *, known: bool, seq: int) -> None:
        """A connection began: continue at `seq`, or from the beginning of what is kept where nothing is known."""
        assert self.spool is not None
        if known:
            if seq < self.spool.acked:  # its disk lost the newest of what it had acknowledged
                log.warning("the learner lost records that it had acknowledged: what is kept of them is sent again")
                self.spool.rewind()
            self.spool.acknowledge(seq)
        else:
            if self.spool.acked > self.spool.first:
                log.info("the learner does not know this session: resending what is kept of it")
            self.spool.rewind()
        self._restart()

    def close(self) -> None:
        """Release the spool; what is not acknowledged stays in it, if it is on disk."""
        for spool in (self._former, self.spool):
            if spool is not None:
                spool.close()

    def _drop_queue(self) -> int:
        n = len(self._queue)
        for _ in range(n):
            _, record, nbytes = self._queue.popleft()
            self._packed += 1
            self._packed_bytes += nbytes
            self._packed_steps += isinstance(record, Step)
            if isinstance(record, Begin):
                self._spooled_episode = record.episode_id
            elif isinstance(record, End):
                self._spooled_episode = ""
        return n

    def _restart(self) -> None:
        self._send_next = self.spool.acked if self.spool is not None else 0
        self._in_flight.clear()
        self._in_flight_bytes = 0
        self.progress_at = time.monotonic()


def _to_block(episode: str, steps: list[Step]) -> StepBlock:
    """The steps as a block. The arrays of a single step, which is what a live robot sends, are not copied."""
    if len(steps) > 1:
        return StepBlock.from_steps(episode, steps)
    step, first = steps[0], np.zeros(1, np.int32)
    dense: dict[str, np.ndarray] = {}
    sparse: dict[str, SparseRows] = {}
    for key, value in step.observation.items():
        if key.startswith(IMAGE_PREFIX):
            sparse[key] = SparseRows(first, value[None])
        else:
            dense[key] = np.asarray(value, np.float32)[None]
    for key, value in (step.decision or {}).items():
        sparse[DECISION_PREFIX + key] = SparseRows(first, np.asarray(value)[None])
    return StepBlock(
        episode_id=episode,
        first_tick=step.tick,
        observation=dense,
        action=np.asarray(step.action, np.float32)[None],
        **{name: np.array([getattr(step, name)], dtype) for name, dtype in STEP_COLUMNS.items()},
        sparse=sparse,
    )


class _Shapes:
    """The shapes of a block's arrays: steps that differ do not share columns."""

    def __init__(self) -> None:
        self._dense: dict[str, Any] | None = None
        self._sparse: dict[str, tuple[Any, ...]] = {}

    def fit(self, step: Step) -> bool:
        """Whether a step goes into the block; one that does adds its images' and decision's shapes."""
        dense: dict[str, Any] = {"": step.action.shape}
        sparse = {DECISION_PREFIX + k: np.asarray(v) for k, v in step.decision.items()} if step.decision else {}
        for key, value in step.observation.items():
            if key.startswith(IMAGE_PREFIX):
                sparse[key] = value
            else:
                dense[key] = value.shape
        if self._dense is not None and dense != self._dense:
            return False
        if any(self._sparse.get(k, (v.shape, v.dtype)) != (v.shape, v.dtype) for k, v in sparse.items()):
            return False
        self._dense = dense
        self._sparse.update({k: (v.shape, v.dtype) for k, v in sparse.items()})
        return True

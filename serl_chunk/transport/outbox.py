"""The actor's records on their way out: handed over, packed, spooled, sent within a credit, acknowledged."""

from __future__ import annotations

import collections
import dataclasses
import logging
import time
from typing import Any

import numpy as np
import zmq

from serl_chunk.transport import records, wire
from serl_chunk.transport.sockets import try_send
from serl_chunk.transport.spool import Spool
from serl_chunk.transport.stats import Counters, Rate
from serl_chunk.types import IMAGE_PREFIX, Amend, Begin, DataError, End, Record, SparseRows, Step, StepBlock

log = logging.getLogger(__name__)

_MAX_BLOCK_STEPS = 512
_MAX_BLOCK_BYTES = (
    1 << 20
)  # measured with camera rows: more means fresh memory pages for every block, less means more calls
_TURN_BYTES = 4 * _MAX_BLOCK_BYTES  # packed at a time, so that sending and heartbeats get their turn
_FIXED_STEP_BYTES = 64  # of a step beside its arrays, rounded up


class Outbox:
    """A session's outgoing stream.

    The control thread calls `begin`, `step`, `end` and `amend`: each checks the order and appends to a queue. The
    network thread calls the rest. Consecutive steps that wait in the queue travel as one block.
    """

    def __init__(self, spool: Spool, *, credit_bytes: int, spool_bytes: int, max_message_bytes: int) -> None:
        self.spool = spool
        self.blocked = False  # the socket took no more; poll it for writing
        self.counters = Counters("retransmitted", "abandoned")
        self.rate = Rate()
        self.progress_at = time.monotonic()  # when the learner last acknowledged, or nothing was in flight
        self._credit = credit_bytes
        self._spool_bytes = spool_bytes
        self._block_bytes = min(_MAX_BLOCK_BYTES, max_message_bytes // 4)
        self._queue: collections.deque[tuple[str, Step | Record, int]] = collections.deque()
        self._episode: str | None = None
        # Each of these pairs is written by one thread each, and so needs no lock.
        self._handed = self._packed = 0  # records
        self._handed_steps, self._dropped_steps = spool.steps, 0
        self._handed_bytes = self._packed_bytes = 0
        self._in_flight: collections.deque[tuple[int, int]] = collections.deque()  # (end, nbytes) of each message sent
        self._in_flight_bytes = 0
        self._send_next = spool.acked
        self._sent_once = spool.acked

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
        return self.spool.unacked_bytes + self._handed_bytes - self._packed_bytes

    @property
    def steps_recorded(self) -> int:
        """Steps of the session, without those that were dropped because they belonged to another run."""
        return self._handed_steps - self._dropped_steps

    @property
    def full(self) -> bool:
        """Whether so much is unacknowledged that no episode should begin."""
        return self.kept_bytes >= self._spool_bytes

    @property
    def flushed(self) -> bool:
        """Whether the learner has everything that was handed over."""
        return self._handed == self._packed and self.spool.acked == self.spool.next

    def stats(self) -> dict[str, float]:
        """Counts and sizes."""
        return {
            **self.counters,
            "steps_recorded": self.steps_recorded,
            "steps_per_s": self.rate.per_second(),
            "queued": self._handed - self._packed,
            "unacked_records": self.spool.next - self.spool.acked,
            "unacked_bytes": self.kept_bytes,
            "spool_bytes": self.spool.nbytes,
            "in_flight_bytes": self._in_flight_bytes,
        }

    # The network thread.

    @property
    def can_pack(self) -> bool:
        """Whether `pack` has something to do.

        What cannot be sent yet stays in the queue, uncopied: packing it early would cost fresh memory for every row. A
        spool on disk must pack at once, and then wants this without its second half.
        """
        return bool(self._queue) and self.spool.unacked_bytes - self._in_flight_bytes < _TURN_BYTES

    def pack(self) -> None:
        """Move some of what was handed over into the spool. Raises WireError for a value that cannot be sent."""
        if not self.can_pack:
            return
        block: list[Step] = []
        block_bytes, block_episode, shapes = 0, "", _Shapes()
        moved = 0
        while self._queue and moved < _TURN_BYTES:
            episode, record, nbytes = self._queue.popleft()
            moved += nbytes + _FIXED_STEP_BYTES
            if isinstance(record, Step):
                if block and (
                    episode != block_episode
                    or record.tick != block[-1].tick + 1
                    or len(block) == _MAX_BLOCK_STEPS
                    or block_bytes + nbytes > self._block_bytes
                    or not shapes.fit(record)
                ):
                    self._spool(_to_block(block_episode, block), block_bytes, len(block))
                    block, block_bytes = [], 0
                if not block:
                    shapes = _Shapes()
                    shapes.fit(record)
                block.append(record)
                block_bytes, block_episode = block_bytes + nbytes, episode
            else:
                if block:
                    self._spool(_to_block(block_episode, block), block_bytes, len(block))
                    block, block_bytes = [], 0
                self._spool(record, nbytes, 1)
        if block:
            self._spool(_to_block(block_episode, block), block_bytes, len(block))

    def _spool(self, record: Record, nbytes: int, items: int) -> None:
        frames = records.encode_record(record, self.spool.next)
        self.spool.append(records.kind_of(record), records.count_of(record), frames, wire.size_of(frames))
        if isinstance(record, StepBlock):
            self.rate.add(record.n)
        self._packed_bytes += nbytes
        self._packed += items

    def pump(self, socket: zmq.Socket[bytes], token: bytes) -> None:
        """Send what the credit and the socket take."""
        self.blocked = False
        if not self._in_flight:
            self.progress_at = time.monotonic()
        while (entry := self.spool.at(self._send_next)) is not None:
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

    def acknowledged(self, seq: int, *, gap: bool) -> None:
        """The learner has everything below `seq`; with `gap`, it asks for what follows `seq` again."""
        if self.spool.acknowledge(min(seq, self.spool.next)):
            self.progress_at = time.monotonic()
        if gap:
            self._restart()
        while self._in_flight and self._in_flight[0][0] <= self.spool.acked:
            self._in_flight_bytes -= self._in_flight.popleft()[1]

    def connected(self, *, known: bool, abandoned: bool, seq: int) -> None:
        """A connection began: continue at `seq`, or from the beginning of what is kept where nothing is known."""
        if abandoned:
            lost = self.spool.abandon(seq) + self._drop_queue()
            self.counters["abandoned"] += lost
            log.warning("the learner runs another run: %d unacknowledged records of the last one are dropped", lost)
        elif known:
            self.spool.acknowledge(seq)
        else:
            if self.spool.acked > self.spool.first:
                log.info("the learner does not know this session: resending its open episode")
            self.spool.rewind()
        self._restart()

    def _drop_queue(self) -> int:
        n = len(self._queue)
        for _ in range(n):
            _, record, nbytes = self._queue.popleft()
            self._packed += 1
            self._packed_bytes += nbytes
            self._dropped_steps += isinstance(record, Step)
        return n

    def _restart(self) -> None:
        self._send_next = self.spool.acked
        self._in_flight.clear()
        self._in_flight_bytes = 0
        self.progress_at = time.monotonic()


def _to_block(episode: str, steps: list[Step]) -> StepBlock:
    """The steps as a block. A single step's images, which is what a live robot sends, are not copied."""
    if len(steps) > 1:
        return StepBlock.from_steps(episode, steps)
    step = steps[0]
    images = {k: v for k, v in step.observation.items() if k.startswith(IMAGE_PREFIX)}
    rest = {k: v for k, v in step.observation.items() if k not in images}
    block = StepBlock.from_steps(episode, [step._replace(observation=rest)])
    sparse = {k: SparseRows(np.zeros(1, np.int32), v[None]) for k, v in images.items()}
    return dataclasses.replace(block, sparse={**block.sparse, **sparse})


class _Shapes:
    """The shapes of a block's arrays: steps that differ do not share columns."""

    def __init__(self) -> None:
        self._dense: dict[str, Any] | None = None
        self._sparse: dict[str, tuple[Any, ...]] = {}

    def fit(self, step: Step) -> bool:
        """Whether a step goes into the block; one that does adds its images' and decision's shapes."""
        dense: dict[str, Any] = {"": step.action.shape}
        sparse = {f"decision/{k}": np.asarray(v) for k, v in step.decision.items()} if step.decision else {}
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

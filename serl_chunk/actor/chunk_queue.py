"""The actions ahead: chunks indexed by integer control ticks, never by time."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from serl_chunk.types import Source

if TYPE_CHECKING:
    from serl_chunk.actor.policy import Decision


class TickAction(NamedTuple):
    """Who acts on a tick, and how."""

    command: np.ndarray  # float32[A], robot units, before the limits
    source: Source
    decision_tick: int = -1
    version: int = -1  # of the policy
    by_human: bool = False
    human_dims: np.ndarray | None = None  # bool[A], of a human who has a part of the command


class SentTick(NamedTuple):
    """What a tick commanded, until its result is received."""

    tick: int
    choice: TickAction
    command: np.ndarray  # float32[A], the robot's units
    stamp: float  # of its step
    lost_ticks: int  # before it
    began: float  # s on the loop's clock, when it was sent


class ChunkQueue:
    """The policy's plan from the current tick on.

    A chunk is used from the tick it joins at up to index `execute_steps` - 1, or until the next chunk starts.
    Its index at tick t is exactly t - its decision's tick, so the first executed index is the number of ticks that
    passed since its observation (the delay d), whatever those ticks executed. Not thread-safe: it belongs to the
    control thread.

    Args:
        execute_steps: ticks that a chunk serves, counted from its decision.
        hold_after: the command that follows an action where nothing is planned (`HoldPolicy.next`).
        adaptive: the next chunk is planned for the index that a chunk's `steps` request. Until that one joins, the
            chunk goes on: an early end never makes the robot hold.
    """

    def __init__(
        self, execute_steps: int, hold_after: Callable[[np.ndarray], np.ndarray], *, adaptive: bool = False
    ) -> None:
        self.execute_steps, self._hold_after, self._adaptive = execute_steps, hold_after, adaptive
        self.epoch = 0
        self._chunks: list[tuple[int, Decision]] = []  # (first tick, chunk), increasing in both ticks

    def flush(self) -> None:
        """Forget every planned action and begin a new epoch: chunks that are still being computed are refused."""
        self._chunks.clear()
        self.epoch += 1

    def join(self, chunk: Decision, tick: int) -> int | None:
        """Let `chunk` replace the plan from `tick` on; returns its delay in ticks, its first executed index.

        None where it is refused: of another epoch, too late to execute any of it, or older than a chunk that joined.
        """
        delay = tick - chunk.tick
        stale = bool(self._chunks) and chunk.tick <= self._chunks[-1][1].tick
        if chunk.epoch != self.epoch or stale or not 0 <= delay < self.execute_steps:
            return None
        self._chunks = [c for c in self._chunks if c[0] < tick]
        self._chunks.append((tick, chunk))
        return delay

    def pop(self, tick: int) -> TickAction | None:
        """Return the action of `tick`, or None; chunks that end before it are dropped."""
        while len(self._chunks) > 1 and self._chunks[1][0] <= tick:
            del self._chunks[0]
        return self._at(tick)

    def due(self, tick: int) -> int:
        """Return the first tick >= `tick` that the next chunk should act on."""
        if not self._chunks:
            return tick
        newest, steps = self._chunks[-1][1], self.execute_steps
        if self._adaptive and newest.steps is not None:
            steps = min(steps, newest.steps)
        return max(tick, newest.tick + steps)

    def remaining(self, tick: int) -> int:
        return next(n for n in itertools.count() if self._at(tick + n) is None)

    def committed(self, tick: int, count: int, hold: np.ndarray) -> np.ndarray:
        """Return what ticks `tick` to `tick + count` - 1 will execute if no chunk joins: float32[count, A].

        A tick without an action holds: first `hold` float32[A], and behind a planned action `hold_after` it.
        """
        out = np.empty((count, len(hold)), np.float32)
        for i in range(count):
            queued = self._at(tick + i)
            out[i] = hold if queued is None else queued.command
            hold = self._hold_after(out[i])
        return out

    def _at(self, tick: int) -> TickAction | None:
        chunk = next((c for start, c in reversed(self._chunks) if start <= tick), None)
        if chunk is None or tick - chunk.tick >= self.execute_steps:
            return None
        return TickAction(chunk.actions[tick - chunk.tick], Source.POLICY, chunk.tick, chunk.version)

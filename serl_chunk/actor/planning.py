"""When the policy decides and when its chunk takes effect: the interface, and the lockstep form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from serl_chunk.actor.chunk_queue import ChunkQueue, PlannedChunk
from serl_chunk.actor.policy import ChunkPolicy
from serl_chunk.actor.recorder import EpisodeRecorder
from serl_chunk.types import Observation


class Planner(Protocol):
    """Keeps a queue filled. Every method is called by the control thread."""

    delays: list[int]  # of the chunks that joined since `begin`, in ticks

    def begin(self, recorder: EpisodeRecorder, explore: bool) -> None:
        """A new episode, just reset: forget everything planned in the one before."""

    def plan(self, tick: int, observe: Callable[[], Observation], hold: np.ndarray) -> None:
        """Called on every tick that the policy may act on, before its action is taken from the queue.

        `observe` gives the observation of this tick with the frames a decision needs; `hold` float32[A] is
        what the robot does on ticks without an action.
        """

    def flush(self) -> None:
        """Forget everything planned or being planned: a person takes over."""


class LockstepPlanner:
    """The environment waits for the chunk, which takes effect `delay_ticks` after its observation.

    A decision is due `delay_ticks` before the planned actions end, so the next chunk follows the present one
    at index `execute_steps`, or where that one asks to be followed (`actor.adaptive_execution`). After a reset or a
    take-over nothing is planned and the robot holds until the delay has passed. No time is measured: two runs from one
    seed are identical. With a delay above half of the executed steps a second decision is made while the first is under
    way, as with a remote policy whose answers are late but as many as its questions.

    Args:
        before_decision: called before every decision; may take as long as it likes (rate limiter, learning in
            the same process).
    """

    def __init__(
        self, queue: ChunkQueue, policy: ChunkPolicy, delay_ticks: int, before_decision: Callable[[], None] | None
    ) -> None:
        self.delays: list[int] = []
        self._queue = queue
        self._policy = policy
        self._delay = delay_ticks
        self._before_decision = before_decision

    def begin(self, recorder: EpisodeRecorder, explore: bool) -> None:
        """A new episode, just reset: forget everything planned in the one before."""
        self.flush()
        self.delays = []
        self._recorder, self._explore = recorder, explore

    def plan(self, tick: int, observe: Callable[[], Observation], hold: np.ndarray) -> None:
        """Decide where a chunk is due `delay_ticks` from now."""
        if self._queue.due(tick) - tick > self._delay:
            return
        if self._before_decision is not None:
            self._before_decision()
        self._policy.refresh()
        prefix = self._queue.committed(tick, self._delay, hold)
        decision = self._policy.decide(observe(), explore=self._explore, prefix=prefix)
        self._recorder.decided(tick, decision.record)
        chunk = PlannedChunk(decision.actions, tick, decision.version, self._queue.epoch, decision.steps)
        delay = self._queue.join(chunk, tick + self._delay)
        assert delay is not None, "execute_steps > delay_ticks is checked where the configuration is built"
        self.delays.append(delay)

    def flush(self) -> None:
        """Forget everything planned."""
        self._queue.flush()

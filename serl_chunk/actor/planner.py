"""Planners: when the policy decides and when its chunk takes effect, in lockstep and in real time.

In real time inference runs next to the control thread and its chunks join by counted ticks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import numpy as np

from serl_chunk.actor.chunk_queue import ChunkQueue, PlannedChunk
from serl_chunk.actor.clock import Deadlines
from serl_chunk.actor.inference import DelayEstimate, Inference, Request, Result
from serl_chunk.actor.policy import ChunkPolicy
from serl_chunk.actor.recorder import EpisodeRecorder
from serl_chunk.types import ConfigError, Observation


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
        """Forget everything planned or being planned: a human intervenes."""


class LockstepPlanner:
    """The environment waits for the chunk, which takes effect `delay_ticks` after its observation.

    A decision is due `delay_ticks` before the planned actions end, so the next chunk follows the present one at index
    `execute_steps`, or where that one asks to be followed (`actor.adaptive_execution`). After a reset or an
    intervention nothing is planned and the robot holds until the delay has passed. No time is measured: two runs from
    one seed are identical. With a delay above half of the executed steps a second decision is made while the first is
    under way, as with a remote policy whose answers are late but as many as its questions.

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


SYNC_SHARE = 0.5  # of a tick: how long the control thread waits for a chunk, and what `auto` asks of inference
OWN_RATE_SHARE = 0.9  # of a tick: an environment whose steps take more leaves too little for the policy


def choose_inference(
    wanted: Literal["auto", "sync", "async"],
    seconds: list[float],
    period: float,
    execute_steps: int,
    supports_prefix: bool,
) -> Literal["sync", "async"]:
    """`sync` or `async` from measured inference `seconds` and the tick's `period`, in seconds.

    Raises ConfigError where inference is too slow for the chunk, or the agent cannot take a delay.
    """
    p50, p99 = np.percentile(seconds, (50, 99))
    mode = wanted
    if mode == "auto":
        mode = "sync" if p99 < SYNC_SHARE * period else "async"
    figures = f"inference takes {p50 * 1e3:.1f} ms (p99 {p99 * 1e3:.1f}), a tick {period * 1e3:.1f} ms"
    if mode == "async" and not supports_prefix:
        raise ConfigError(
            f"{figures}, and this agent cannot plan with a delay: use actor.inference=sync with a smaller network or "
            "fewer agent.candidates, or an agent that takes a prefix"
        )
    within_tick = mode == "sync" and p50 <= SYNC_SHARE * period
    if not within_tick and max(1, math.ceil(p50 / period)) >= execute_steps:
        raise ConfigError(
            f"{figures}: every chunk would come after its {execute_steps} actions should have been executed. Raise "
            "chunk.horizon and chunk.execute_steps, or use a smaller network or fewer agent.candidates"
        )
    return mode


def slow_step_warning(seconds: Sequence[float], period: float) -> str:
    """Warning for the operator where steps of the environment, in seconds, fill the tick's `period`; empty if not."""
    if len(seconds) == 0 or (p50 := float(np.median(seconds))) < OWN_RATE_SHARE * period:
        return ""
    return (
        f"WARNING: a step of the environment takes {p50 * 1e3:.1f} ms (median) of a tick of {period * 1e3:.1f} ms: too "
        "little is left for the policy, so ticks begin late and the robot may run below robot.control_hz. If step() "
        "sleeps to keep a rate of its own, let it sleep less (docs/your_robot.md, section 7); if it does "
        "not, lower robot.control_hz"
    )


class RealtimePlanner:
    """Requests chunks from an inference thread and joins them when they come.

    `sync`: where nothing is planned, the control thread waits for the chunk, half a period from the tick's beginning
    at most; then the robot holds. A tick that begins late waits as long: the lateness may be the environment's own
    rate, which no hold would make up for. `async`: the next chunk is requested while the present one still has as many
    actions as inference is expected to take ticks, plus one; it is conditioned on those actions. Those behind the
    index at which a chunk asks to be followed (`actor.adaptive_execution`) do not count as left. Either way it
    joins at the index that equals the ticks passed since its observation, and at most one request is under
    way. A result of an earlier epoch, or one too late to execute, is dropped, and its step is recorded without
    a decision.
    """

    def __init__(
        self, queue: ChunkQueue, inference: Inference, mode: Literal["sync", "async"], delay: DelayEstimate
    ) -> None:
        self.delays: list[int] = []
        self.mode = mode
        self._queue = queue
        self._inference = inference
        self._delay = delay
        self._under_way: int | None = None  # decision tick of the request that may still be used
        self._deadlines: Deadlines | None = None

    def begin(self, recorder: EpisodeRecorder, explore: bool) -> None:
        """A new episode, just reset: forget everything planned in the one before."""
        self.flush()
        self.delays = []
        self._recorder, self._explore = recorder, explore

    def start(self, deadlines: Deadlines) -> None:
        """Tick 0 of the episode is about to begin."""
        self._deadlines = deadlines

    def plan(self, tick: int, observe: Callable[[], Observation], hold: np.ndarray) -> None:
        """Take what has come, and ask for the next chunk where it is time to."""
        self._take(self._inference.poll(), tick)
        if self._under_way is not None:
            if tick - self._under_way < self._queue.execute_steps:
                return
            self._give_up()
        count = 0 if self.mode == "sync" else self._delay.expected()
        margin = 0 if self.mode == "sync" else 1
        # A chunk that wants to be followed early still goes on until the next one joins.
        if min(self._queue.remaining(tick), self._queue.due(tick) - tick) > count + margin:
            return
        prefix = self._queue.committed(tick, count, hold)
        self._under_way = tick
        self._recorder.expect(tick)
        self._inference.submit(Request(observe(), tick, self._queue.epoch, self._explore, prefix))
        if self.mode == "sync":
            assert self._deadlines is not None
            until = self._deadlines.began + SYNC_SHARE * self._deadlines.period
            # The first to come may answer a request from before an intervention or a reset.
            while self._under_way is not None and (result := self._inference.wait(until)) is not None:
                self._take(result, tick)

    def flush(self) -> None:
        """Forget everything planned or being planned."""
        self._queue.flush()
        self._give_up()

    def _give_up(self) -> None:
        if self._under_way is not None:
            self._under_way = None
            self._recorder.release()

    def _take(self, result: Result | None, tick: int) -> None:
        if result is None:
            return
        request, decision = result
        if request.epoch != self._queue.epoch or request.tick != self._under_way:
            return
        self._under_way = None
        self._delay.add(tick - request.tick)
        chunk = PlannedChunk(decision.actions, request.tick, decision.version, request.epoch, decision.steps)
        delay = self._queue.join(chunk, tick)
        if delay is None:
            self._recorder.release()
        else:
            self.delays.append(delay)
            self._recorder.decided(request.tick, decision.record)

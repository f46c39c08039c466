"""Planners: they choose the actions of ticks that no human commands, and when a policy's chunks take effect."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Literal

import numpy as np

from serl_chunk.actor.chunk_queue import ChunkQueue, TickAction
from serl_chunk.actor.clock import Clock, Deadlines
from serl_chunk.actor.inference import DelayEstimate, InferenceThread, measure_inference, while_polling
from serl_chunk.actor.policy import Decision, Policy, PolicyAwayError, Request
from serl_chunk.actor.recorder import EpisodeRecorder
from serl_chunk.robots.base import Expert
from serl_chunk.types import ConfigError, Observation, Source


class Planner:
    """No policy: the robot holds unless a human acts. Base of the other planners; the control thread calls them."""

    execute_steps = 1  # ticks that a decision serves

    def begin(
        self, recorder: EpisodeRecorder, seed: int, *, explore: bool, arm: str = "", decision_seed: int | None = None
    ) -> None:
        """Forget what was planned in the previous episode; the environment was reset with `seed`.

        `arm`: see `policy.Request`. `decision_seed`: of the decisions' keys; None: of the policy's counter.
        """

    def start(self, deadlines: Deadlines) -> None: ...

    def plan(self, tick: int, observe: Callable[[], Observation], hold: np.ndarray) -> Request | None:
        """Return a request whose decision the tick waits for; called where the policy may act, before `action`.

        `observe` gives this tick's observation with its frames; `hold` float32[A] acts on ticks without an action.
        """
        return None

    def accept(self, decision: Decision, tick: int) -> None:
        raise NotImplementedError

    def action(self, tick: int) -> TickAction | None:
        return None

    def would_decide(self, tick: int, *, by_human: bool) -> bool:
        """Return whether a decision is due, had an intervention not dropped the plan (`by_human`: on the last tick)."""
        return True

    def flush(self) -> None:
        """Forget everything planned or being planned."""

    def rest(self, tick: int, observe: Callable[[], Observation], hold: np.ndarray) -> None:
        """Take a tick on which the operator holds the robot; see `plan`."""
        self.flush()

    def close(self) -> None: ...


class ExpertPlanner(Planner):
    """The scripted demonstrator of an environment acts on every tick."""

    def __init__(self, expert: Expert) -> None:
        self._expert = expert

    def begin(
        self, recorder: EpisodeRecorder, seed: int, *, explore: bool, arm: str = "", decision_seed: int | None = None
    ) -> None:
        self._expert.reset(seed)

    def action(self, tick: int) -> TickAction | None:
        return TickAction(np.asarray(self._expert.act(), np.float32), Source.SCRIPTED)


class ChunkPlanner(Planner):
    """Executes the chunks of a policy from a queue."""

    def __init__(self, queue: ChunkQueue, policy: Policy) -> None:
        self.execute_steps = queue.execute_steps
        self._queue, self._policy = queue, policy
        self._decided_at = 0  # decision tick of the last executed chunk

    def begin(
        self, recorder: EpisodeRecorder, seed: int, *, explore: bool, arm: str = "", decision_seed: int | None = None
    ) -> None:
        self.flush()
        self._decided_at, self._recorder, self._explore = 0, recorder, explore
        self._task, self._arm, self._seed = recorder.task, arm, decision_seed
        self._requests = 0  # of the episode

    def action(self, tick: int) -> TickAction | None:
        queued = self._queue.pop(tick)
        if queued is None:
            return None
        self._decided_at = queued.decision_tick
        return queued

    def would_decide(self, tick: int, *, by_human: bool) -> bool:
        if by_human:
            return (tick - self._decided_at) % self.execute_steps == 0
        return self._queue.remaining(tick) == 0

    def flush(self) -> None:
        self._queue.flush()

    def _request(self, tick: int, observe: Callable[[], Observation], hold: np.ndarray, delay: int) -> Request:
        prefix = self._queue.committed(tick, delay, hold)
        key = None if self._seed is None else (self._seed, self._requests)
        self._requests += 1
        return Request(observe(), tick, self._queue.epoch, self._explore, prefix, self._task, self._arm, key)


class LockstepPlanner(ChunkPlanner):
    """The environment waits for the chunk, which takes effect `delay_ticks` after its observation.

    A decision is due `delay_ticks` before the planned actions end, so the next chunk follows the current one at index
    `execute_steps`, or where that one requests to be followed (`actor.adaptive_execution`). After a reset or an
    intervention the robot holds until the delay has passed. With a delay above half of the executed steps a second
    decision is made while the first is under way. No time is measured, and `before_decision` may take any.
    """

    def __init__(
        self, queue: ChunkQueue, policy: Policy, delay_ticks: int, before_decision: Callable[[], None] | None
    ) -> None:
        super().__init__(queue, policy)
        self._delay, self._before_decision = delay_ticks, before_decision

    def plan(self, tick: int, observe: Callable[[], Observation], hold: np.ndarray) -> Request | None:
        if self._queue.due(tick) - tick > self._delay:
            return None
        if self._before_decision is not None:
            self._before_decision()
        if not self._policy.by_episode:
            self._policy.refresh()
        return self._request(tick, observe, hold, self._delay)

    def accept(self, decision: Decision, tick: int) -> None:
        self._recorder.decided(decision)
        joined = self._queue.join(decision, tick + self._delay) is not None
        assert joined, "execute_steps > delay_ticks is checked where the configuration is built"


Mode = Literal["sync", "async"]
Wanted = Literal["auto", "sync", "async"]

SYNC_SHARE = 0.5  # of a tick: how long the control thread waits for a chunk, and what `auto` requires of inference


def choose_inference(wanted: Wanted, seconds: list[float], period: float, execute_steps: int) -> Mode:
    """Choose `sync` or `async` from measured inference `seconds` and the tick's `period`, in seconds.

    Raises ConfigError where inference is too slow for the chunk.
    """
    p50, p99 = np.percentile(seconds, (50, 99))
    mode: Mode = wanted if wanted != "auto" else "sync" if p99 < SYNC_SHARE * period else "async"
    figures = f"inference takes {p50 * 1e3:.1f} ms (p99 {p99 * 1e3:.1f}), a tick {period * 1e3:.1f} ms"
    within_tick = mode == "sync" and p50 <= SYNC_SHARE * period
    if not within_tick and max(1, math.ceil(p50 / period)) >= execute_steps:
        raise ConfigError(
            f"{figures}: every chunk would come after its {execute_steps} actions should have been executed. Raise "
            "chunk.horizon and chunk.execute_steps, or use a smaller network or fewer agent.candidates"
        )
    return mode


class RealtimePlanner(ChunkPlanner):
    """Requests chunks from an inference thread and joins them when they come.

    `sync`: where nothing is planned, the control thread waits for the chunk, half a period from the tick's beginning
    at most; then the robot holds. A tick that begins late waits as long: the lateness may be the environment's own
    rate, which no hold would make up for. `async`: the next chunk is requested while the current one still has as many
    actions as inference is expected to take ticks, plus one; it is conditioned on those actions. Either way it joins
    at the index that equals the ticks passed since its observation, and at most one request is under way. A decision
    of an earlier epoch, or one too late to execute, is dropped, and its step recorded without one.
    """

    def __init__(
        self, queue: ChunkQueue, policy: Policy, inference: InferenceThread, mode: Mode, delay: DelayEstimate
    ) -> None:
        super().__init__(queue, policy)
        self.mode, self._inference, self._delay = mode, inference, delay
        self._under_way: int | None = None  # decision tick of the request that may still be used
        self._deadlines: Deadlines | None = None

    def start(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines

    def plan(self, tick: int, observe: Callable[[], Observation], hold: np.ndarray) -> Request | None:
        """Take what has come, and submit the next request where it is due. No tick waits for what is returned."""
        if (decision := self._inference.poll()) is not None:
            self.accept(decision, tick)
        if self._under_way is not None:
            if tick - self._under_way < self.execute_steps:
                return None
            self._give_up()
        count, margin = (0, 0) if self.mode == "sync" else (self._delay.expected(), 1)
        # A chunk that requests to be followed early still goes on until the next one joins.
        if min(self._queue.remaining(tick), self._queue.due(tick) - tick) > count + margin:
            return None
        self._under_way = tick
        self._recorder.expect(tick)
        self._inference.submit(self._request(tick, observe, hold, count))
        if self.mode == "sync":
            assert self._deadlines is not None
            until = self._deadlines.began + SYNC_SHARE * self._deadlines.period
            # The first to come may answer a request from before an intervention or a reset.
            while self._under_way is not None and (decision := self._inference.wait(until)) is not None:
                self.accept(decision, tick)
        return None

    def accept(self, decision: Decision, tick: int) -> None:
        if decision.epoch != self._queue.epoch or decision.tick != self._under_way:
            return
        self._under_way = None
        self._delay.add(tick - decision.tick)
        if self._queue.join(decision, tick) is None:
            self._recorder.release()
        else:
            self._recorder.decided(decision)

    def flush(self) -> None:
        super().flush()
        self._inference.flush()
        self._give_up()

    def close(self) -> None:
        self._inference.close()

    def _give_up(self) -> None:
        if self._under_way is not None:
            self._under_way = None
            self._recorder.release()


def realtime_planner(
    queue: ChunkQueue, policy: Policy, inference: InferenceThread | None, clock: Clock, period: float,
    wanted: Wanted, request: Request, make: Callable[..., RealtimePlanner] = RealtimePlanner,
    stop: Callable[[], str | None] = lambda: None, poll: Callable[[], object] = lambda: None,
) -> RealtimePlanner | None:  # fmt: skip
    """Compile and measure inference, then `make` the planner and, unless given, its thread; see `choose_inference`.

    Returns None where `stop` ends the wait for a policy that is away; `poll` is called meanwhile.
    """
    policy.refresh()
    ended = threading.Event()

    def decide() -> None:
        if policy.decide_patiently(request, lambda: "ended" if ended.is_set() else stop()) is None:
            raise PolicyAwayError(policy.waiting or "the policy was away while its inference was measured")

    try:
        seconds = while_polling(lambda: measure_inference(decide, clock), poll, ended.set)
    except PolicyAwayError:
        if stop() is None:
            raise
        return None
    mode = choose_inference(wanted, seconds, period, queue.execute_steps)
    delay = DelayEstimate((math.ceil(s / period) for s in seconds), longest=queue.execute_steps - 1)
    return make(queue, policy, inference or InferenceThread(policy, clock), mode, delay)

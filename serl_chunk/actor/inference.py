"""Inference next to the control thread: a thread, a mailbox for the newest request, and a thread that loads."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import numpy as np

from serl_chunk.actor.clock import Clock
from serl_chunk.actor.policy import Decision, Policy, PolicyAwayError, Request

INTERRUPT_SECONDS = 0.1  # between attempts to end a decision that waits
POLL_SECONDS = 0.01  # between two polls while another thread works
T = TypeVar("T")


class InferenceThread:
    """Decides in a daemon thread while the control thread goes on; one more thread loads new parameters.

    They are looked for after each decision. Loading 100 MB takes several ticks: decisions go on meanwhile with the
    parameters before. A policy that is away gives no decision. Another error of either thread is raised by `poll` and
    `wait`.
    """

    def __init__(self, policy: Policy, clock: Clock) -> None:
        self._policy, self._clock = policy, clock
        self._changed = threading.Condition()
        self._request: Request | None = None
        self._result: Decision | None = None
        self._error: BaseException | None = None
        self._closed = False
        self._flushes = 0
        self._look = False  # for newer parameters
        self._threads = [
            threading.Thread(target=self._guard, args=(work,), name=name, daemon=True)
            for name, work in (("inference", self._decide), ("parameters", self._load))
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, request: Request) -> None:
        """Request a decision; it replaces a request that was not begun yet."""
        with self._changed:
            self._request = request
            self._changed.notify_all()

    def flush(self) -> None:
        """Drop the request that was not begun, the decision that was not taken, and one under way once it comes."""
        with self._changed:
            self._request = self._result = None
            self._flushes += 1

    def poll(self) -> Decision | None:
        with self._changed:
            return self._take()

    def wait(self, moment: float) -> Decision | None:
        """Return the same, waiting for one until `moment` on the clock."""
        with self._changed:
            while self._result is None and self._error is None:
                left = moment - self._clock.now()
                if left <= 0:
                    break
                self._changed.wait(left)
            return self._take()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            while thread.is_alive():
                self._policy.interrupt()  # again: a decision may begin just after it
                thread.join(INTERRUPT_SECONDS)

    def _take(self) -> Decision | None:
        if self._error is not None:
            raise self._error  # it carries the thread's own traceback
        result, self._result = self._result, None
        return result

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # handed to the control thread, which raises it
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _decide(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._request is not None)
                if self._closed:
                    return
                request, self._request, flushes = self._request, None, self._flushes
            assert request is not None
            try:
                decision = self._policy.decide(request)
            except PolicyAwayError:  # the robot holds, and the planner requests anew
                continue
            with self._changed:
                self._look = True
                if flushes == self._flushes:
                    self._result = decision
                self._changed.notify_all()

    def _load(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._look)
                if self._closed:
                    return
                self._look = False
            if not self._policy.by_episode:
                self._policy.refresh()


class DelayEstimate:
    """Ticks that a decision takes: the 95th percentile of the newest, so that a slow one is soon forgotten.

    `ticks` were measured before the first episode. A chunk that arrives later than `longest` executes nothing.
    """

    def __init__(self, ticks: Iterable[int], longest: int) -> None:
        self._longest = longest
        self._ticks = deque(ticks, maxlen=64)

    def add(self, ticks: int) -> None:
        self._ticks.append(ticks)

    def expected(self) -> int:
        return min(max(1, math.ceil(np.percentile(self._ticks, 95))), self._longest)


def while_polling(work: Callable[[], T], poll: Callable[[], object], end: Callable[[], object] = lambda: None) -> T:
    """Call `work` on another thread and `poll` on this one; returns what `work` does, and raises its error.

    A robot's lease and an operator's keys need polls, also while something compiles. `end`: ends `work` where a poll
    raises.
    """
    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(work)
        try:
            while not wait([done], POLL_SECONDS).done:
                poll()
        except BaseException:
            end()
            raise
    return done.result()


def measure_inference(decide: Callable[[], object], clock: Clock) -> list[float]:
    """Measure the seconds of 50 decisions, after 3 that compile and fill caches."""
    for _ in range(3):
        decide()
    seconds = []
    for _ in range(50):
        before = clock.now()
        decide()
        seconds.append(clock.now() - before)
    return seconds

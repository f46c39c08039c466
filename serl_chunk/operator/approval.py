"""Approval of chunks: the first ones of each new policy version are executed once the operator has seen them.

Where such a chunk is due, the robot holds. Once it stands, a chunk is planned and shown, and "go on" executes exactly
that one. A newer version that comes meanwhile changes nothing of what is shown; its own chunk is shown after it.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import numpy as np

from serl_chunk.actor.planner import RealtimePlanner
from serl_chunk.actor.policy import Decision, Request
from serl_chunk.console.view import Proposed
from serl_chunk.operator.motion_permit import Permit
from serl_chunk.types import Observation

SETTLE_SECONDS = 0.5  # of holding, after which the robot stands


class Approval:
    """A chunk that an operator looks at. Of one control loop, whose thread makes all calls.

    Attributes:
        number: of chunks of each policy version that need an approval.
        proposed: what is shown; None where nothing is.
        question: to the operator.

    Args:
        permit: of the robot to move, which a new proposal takes away.
        stopped: whether the robot is stopped, and might be moved by hand.
    """

    def __init__(self, permit: Permit, stopped: Callable[[], bool], key: str) -> None:
        self.number = 0
        self.stopped = stopped
        self.proposed: Proposed | None = None
        self.question = ""
        self._permit, self._key, self._serial = permit, key, 0

    @property
    def granted(self) -> bool:
        """Whether the operator went on after the chunk was proposed, and the countdown is over."""
        return self.proposed is not None and self._permit.granted

    def hold(self) -> None:
        self._permit.hold()

    def propose(self, decision: Decision, nth: int) -> None:
        """Show a chunk, the `nth` of its version. What was confirmed before does not count for it."""
        self._permit.hold()
        self._serial += 1
        self.proposed = Proposed(self._serial, decision.actions)
        which = f"chunk {nth} of {self.number} of policy version {decision.version}"
        self.question = f"approve {which}? {self._key} executes it"

    def withdraw(self) -> None:
        """Show no chunk any more. A countdown to one ends."""
        if self.proposed is not None and self._permit.counts:
            self._permit.hold()
        self.proposed, self.question = None, ""


class ApprovedPlanner(RealtimePlanner):
    """Holds before each chunk that needs an approval, and executes it once it has one."""

    def __init__(self, approval: Approval, *args: Any) -> None:
        super().__init__(*args)
        self._approval = approval
        self._approved = collections.Counter[int]()  # version -> chunks
        self._held_from: int | None = None  # tick
        self._asked: int | None = None  # tick of the request for a chunk to show
        self._waiting: Decision | None = None  # for its approval

    def plan(self, tick: int, observe: Callable[[], Observation], hold: np.ndarray) -> Request | None:
        approval, waiting = self._approval, self._waiting
        if waiting is not None and approval.granted:
            self._execute(waiting, tick, observe)
            return None
        if not self._needs(self._policy.version):
            return super().plan(tick, observe, hold)
        self._give_up()
        if waiting is None and self._queue.remaining(tick) == 0:
            approval.hold()
        return None

    def accept(self, decision: Decision, tick: int) -> None:
        if decision.tick == self._under_way and self._needs(decision.version):  # which came after the request
            self._give_up()
        else:
            super().accept(decision, tick)

    def rest(self, tick: int, observe: Callable[[], Observation], hold: np.ndarray) -> None:
        """Plan a chunk to show, once the robot stands."""
        if self._held_from is None or self._approval.stopped():
            self.flush()
            self._held_from = tick
        elif self._waiting is None and self._needs(self._policy.version):
            self._prepare(tick, tick - self._held_from, observe, hold)

    def flush(self) -> None:
        super().flush()
        self._held_from = self._asked = self._waiting = None
        self._approval.withdraw()

    def _needs(self, version: int) -> bool:
        return self._approved[version] < self._approval.number

    def _prepare(self, tick: int, held: int, observe: Callable[[], Observation], hold: np.ndarray) -> None:
        assert self._deadlines is not None
        if self._asked is None:
            if held * self._deadlines.period >= SETTLE_SECONDS:
                self._asked = tick
                self._inference.submit(self._request(tick, observe, hold, 0))
            return
        decision = self._inference.poll()
        # Ticks repeat from episode to episode: only the epoch distinguishes a late reply to a former one.
        if decision is not None and (decision.tick, decision.epoch) == (self._asked, self._queue.epoch):
            self._asked = None
            if self._needs(decision.version):
                self._waiting = decision
                self._approval.propose(decision, self._approved[decision.version] + 1)

    def _execute(self, decision: Decision, tick: int, observe: Callable[[], Observation]) -> None:
        self._waiting = self._held_from = None
        self._approval.withdraw()
        self._approved[decision.version] += 1
        observe()  # the step of a decision has its frames
        decision = decision._replace(tick=tick, epoch=self._queue.epoch)
        joined = self._queue.join(decision, tick)
        assert joined == 0, "nothing was planned since the hold began"
        self._recorder.decided(decision)

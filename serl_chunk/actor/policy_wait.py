"""Waits of a control loop for its policy, in which the operator's keys count."""

from __future__ import annotations

from collections.abc import Callable

from serl_chunk.actor.interfaces import LoopOperator
from serl_chunk.actor.policy import Policy
from serl_chunk.console.view import Obstacle
from serl_chunk.outcomes.judge import OPERATOR

NO_SERVER = "start the policy server, or check actor.policy"


def no_stop() -> str | None:
    """A `stop` that never stops."""
    return None


class PolicyWait:
    """Polls the operator while a policy is away, or decides elsewhere. The control thread makes all calls.

    Args:
        policy: None where the robot has none.
        stop: of the session, without the operator's own: a stop of the robot before an episode is latched, and the
            reset that follows the wait waits for a clear.
    """

    def __init__(self, policy: Policy | None, operator: LoopOperator, stop: Callable[[], str | None]) -> None:
        self._policy, self._operator, self._stop = policy, operator, stop

    def over(self) -> str | None:
        """Return what ends the session before the next episode: nothing moves the robot any more."""
        return OPERATOR if self._operator.quits else self._stop()

    def poll(self) -> None:
        waiting = "" if self._policy is None else self._policy.waiting
        self._operator.waits(*([Obstacle(waiting, NO_SERVER)] if waiting else []))

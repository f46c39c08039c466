"""The operator of an evaluation: labels of episodes that nothing else judged, and interventions, which end them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from serl_chunk.actor.stats import EpisodeSummary
from serl_chunk.console.bindings import ActorState
from serl_chunk.console.view import Obstacle
from serl_chunk.evaluation.results import INTERVENTION
from serl_chunk.operator.operator import Operator
from serl_chunk.outcomes.judge import OPERATOR
from serl_chunk.robots.base import InterventionCommand, InterventionSource
from serl_chunk.types import Amend, Observation, Outcome

POLL_SECONDS = 0.02  # between looks at the keys while a label is waited for
UNJUDGED = Obstacle("the episode has no outcome", "press s or f; Backspace or r does it again")
FAILED = Obstacle("a human intervened: a failure", "press f to go on; Backspace or r does it again")


class SingleIntervention:
    """An intervention source whose human has the robot once in an episode. `over`: it was let go.

    The policy does not take over again: what it did made a human step in.
    """

    def __init__(self, source: InterventionSource) -> None:
        self._source = source
        self._began = self.over = False

    def reset(self, seed: int) -> None:
        self._began = self.over = False
        self._source.reset(seed)

    def poll(
        self, tick: int, observation: Observation, decision_tick: bool, last: np.ndarray
    ) -> InterventionCommand | None:
        command = self._source.poll(tick, observation, decision_tick, last)
        self.over |= self._began and command is None
        self._began |= command is not None
        return command

    def close(self) -> None:
        self._source.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)  # what an operator looks at, as devices that were lost


class EvaluationOperator:
    """What the operator decides of the episodes of an evaluation.

    An episode that ended without an outcome waits for a label before the next reset: the robot stands in HOLD, and
    nothing else waits. A discarded episode is done again at once, and one whose label was undone after the episode
    under way.

    Args:
        wait: sleeps for some seconds.
    """

    def __init__(self, wait: Callable[[float], object] = time.sleep) -> None:
        self.operator: Operator | None = None
        """Set once its console is open; it sends its corrections to `amend`. None: unjudged episodes are failures."""
        self._wait = wait
        self._undone: set[str] = set()

    @property
    def quits(self) -> bool:
        """Whether the evaluation is to end after the episode under way."""
        return self.operator is not None and self.operator.quits

    def amend(self, amend: Amend) -> None:
        """Take a correction of the operator's."""
        self._undone.add(amend.episode_id)

    def undone(self, *, last: bool = False) -> set[str]:
        """Return the episodes whose labels were undone, or that were discarded later, since the last call.

        Args:
            last: no episode follows, which would make a discard final.
        """
        if last and self.operator is not None:
            self.operator.send_pending()
        undone, self._undone = self._undone, set()
        return undone

    def settle(
        self, summary: EpisodeSummary, episode_id: str, over: Callable[[], object], idle: Callable[[], None]
    ) -> EpisodeSummary | None:
        """Return an episode with its outcome, for which it waits where there is none; None: it is to be done again.

        Args:
            over: what is no longer None where the evaluation was ended, which ends the wait.
            idle: called while it waits (`RobotEnv.idle`).
        """
        operator = self.operator
        if operator is None or summary.fault:
            return summary
        labels = operator.labels
        intervened = summary.ended_by == INTERVENTION
        if intervened or summary.outcome is Outcome.UNKNOWN:
            label: Outcome | None = None
            while label is None and not (labels.discards_last or labels.repeats):
                if over() is not None:
                    return None
                idle()
                labels.ask()
                operator.poll(ActorState.HOLD, FAILED if intervened else UNJUDGED)
                label = labels.answer()
                self._wait(POLL_SECONDS)
            if label is not None and not intervened:
                summary = summary.judged(label, OPERATOR)
        if labels.discards_last or labels.repeats:
            operator.send_pending()  # that it is done again cannot be undone
            self._undone.discard(episode_id)
            return None
        return summary

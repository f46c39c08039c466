"""Judges each tick's result: its reward, and whether it ended the episode."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.outcomes.classifier import CLASS_PROBABILITY, Classifier
from serl_chunk.types import IMAGE_PREFIX, STATE, ConfigError, Observation, Outcome, RobotSpec

OPERATOR = "operator"  # `outcome_by` of an episode that the operator ended
CLASSIFIER = "classifier"  # of one that the classifier ended
FUNCTION = "outcome.success"  # of one that the experiment's function ended
CONDITION = "outcome.condition"

Look = Callable[[Sequence[str]], Observation]
"""Returns the observation after a tick, with the frames of the cameras that it is given."""


class Verdict(NamedTuple):
    """The result of one tick.

    `terminated`: it ended the episode, with `outcome`, which is UNKNOWN otherwise. `truncated`: the environment ended
    the episode, and is not to decide on that.
    """

    reward: float
    terminated: bool
    outcome: Outcome
    by: str
    truncated: bool = False


class Judge:
    """Decides on success and failure: an operator's label, the environment, then `outcome.classifier` or
    `outcome.success`.

    A success by one of the last two adds 1 to the environment's reward, and a stage before it `outcome.stage_reward`.
    They are not called where one before them ended the episode. With `outcome.environment=False` the environment
    decides and rewards nothing.

    `goes_on`: the robot's. `compiled`: False: the first look compiles it, for a check of the configuration.
    Raises ConfigError where the classifier cannot be read, lacks a class, or is one of other cameras than the robot's.
    """

    def __init__(
        self, config: ExperimentConfig, spec: RobotSpec, *, goes_on: bool = False, compiled: bool = True
    ) -> None:
        outcome = config.outcome
        self._success, self._condition = outcome.success, outcome.condition
        self._hidden, self._failure_reward = not outcome.environment, config.reward.failure_reward
        self._classifier: Classifier | None = None
        self._stage_reward = outcome.stage_reward
        self._chains: list[list[int]] = []  # of classes that are to be seen in their order
        if outcome.classifier:
            self._classifier = Classifier(outcome.classifier, compiled=compiled)
            self._classifier.check(spec)
            chains = outcome.chains or (self._classifier.description.classes[-1:],)
            self._chains = [self._classifier.numbers(chain, "outcome.stages") for chain in chains]
        self._last_tick = spec.max_episode_steps - 1 if goes_on else 0
        self._given = {STATE, *(IMAGE_PREFIX + c for c in outcome.cameras)}  # to the function
        self.shown = self._classifier.cameras if self._classifier else ()
        """Cameras of the classifier, which learns from a corrected episode by their last frames."""
        self.cameras = tuple(dict.fromkeys((*self.shown, *outcome.cameras)))
        """Cameras whose frames are looked at on every tick."""
        self._environment: Outcome = Outcome.UNKNOWN  # what the environment judged first
        self._begin()

    @property
    def environment(self) -> Outcome | None:
        """What the environment judged first in this episode, where it does not decide; else None."""
        return self._environment if self._hidden else None

    def verdict(
        self, tick: int, look: Look, reward: float, terminated: bool, info: Mapping[str, Any],
        label: Outcome | None = None,
    ) -> Verdict:  # fmt: skip
        """Judge a tick, of which 0 begins an episode, by what the environment gave and the operator's label.

        Raises ConfigError where a function returns something else than a truth value.
        """
        if tick == 0:
            self._begin()
        judged = Outcome.SUCCESS if info.get("success") else Outcome.FAILURE if info.get("failure") else Outcome.UNKNOWN
        if self._environment is Outcome.UNKNOWN:
            self._environment = judged
        cut = False
        if self._hidden:
            cut = terminated and tick >= self._last_tick
            reward, terminated, judged = 0.0, False, Outcome.UNKNOWN
        if label is not None:
            return Verdict(self._reward(label, max(reward, 1.0)), True, label, OPERATOR)
        if judged is not Outcome.UNKNOWN:
            return Verdict(self._reward(judged, reward), True, judged, "environment")
        if not terminated:
            reached = max(self._stages, default=0)
            if by := self._success_by(look, info):
                return Verdict(reward + 1.0, True, Outcome.SUCCESS, by)
            # Of the chain that is furthest: several that share a class are ways to one goal.
            reward += self._stage_reward * (max(self._stages, default=0) - reached)
        return Verdict(reward, terminated, Outcome.UNKNOWN, "environment", truncated=cut)

    def _begin(self) -> None:
        self._environment = Outcome.UNKNOWN
        self._stages = [0] * len(self._chains)  # classes of each chain that were seen
        if self._classifier is not None:
            self._classifier.reset()

    def _reward(self, outcome: Outcome, of_success: float) -> float:
        return of_success if outcome is Outcome.SUCCESS else self._failure_reward

    def _success_by(self, look: Look, info: Mapping[str, Any]) -> str:
        """Return what finds a success in the observation; empty: there is none."""
        if self._classifier is not None:
            return CLASSIFIER if self._classified(self._classifier, look, info) else ""
        if self._success is None:
            return ""
        given = {key: value for key, value in look(self.cameras).items() if key in self._given}
        return FUNCTION if _truth(self._success(given), FUNCTION) else ""

    def _classified(self, classifier: Classifier, look: Look, info: Mapping[str, Any]) -> bool:
        """Look at the next frame; return whether it completes a chain of classes."""
        holds = self._condition is None or _truth(self._condition(look(())), CONDITION)
        if not holds and all(len(chain) == 1 for chain in self._chains):
            classifier.reset()  # no network is needed
            return False
        probability = info.get(CLASS_PROBABILITY)
        classifier.count(classifier.probability(look(self.cameras)) if probability is None else probability, holds)
        for i, chain in enumerate(self._chains):
            last = self._stages[i] == len(chain) - 1
            if classifier.seen(chain[self._stages[i]], holding=last):
                if last:
                    return True
                self._stages[i] += 1
        return False


def _truth(value: Any, parameter: str) -> bool:
    try:
        return bool(value)
    except (TypeError, ValueError) as e:  # as of an array of several
        text = f"must return True or False, got {value!r}: {e}. Reduce it, as by all()"
        raise ConfigError(text, parameter=parameter) from e

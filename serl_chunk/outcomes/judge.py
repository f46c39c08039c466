"""Judges each tick's result: its reward, and whether it ended the episode."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.outcomes.classifier import Classifier
from serl_chunk.types import IMAGE_PREFIX, STATE, ConfigError, Observation, Outcome, RobotSpec

OPERATOR = "operator"  # `outcome_by` of an episode that the operator ended
CLASSIFIER = "classifier"  # of one that the classifier ended
FUNCTION = "outcome.success"  # of one that the experiment's function ended
CONDITION = "outcome.condition"


class Verdict(NamedTuple):
    """The result of one tick. `terminated`: it ended the episode, with `outcome`, which is UNKNOWN otherwise."""

    reward: float
    terminated: bool
    outcome: Outcome
    by: str


class Judge:
    """Decides on success and failure: an operator's label, the environment, `outcome.classifier`, `outcome.success`.

    A success by one of the last two adds 1 to the environment's reward. They are not called where the environment ended
    the episode.

    Raises:
        ConfigError: the classifier cannot be read, or is one of other cameras than the robot's.
    """

    def __init__(self, config: ExperimentConfig, spec: RobotSpec) -> None:
        outcome = config.outcome
        self._success, self._condition = outcome.success, outcome.condition
        self._failure_reward = config.reward.failure_reward
        self._classifier: Classifier | None = None
        if outcome.classifier:
            self._classifier = Classifier(outcome.classifier)
            self._classifier.check(spec)
        self._given = {STATE, *(IMAGE_PREFIX + c for c in outcome.cameras)}  # to the function
        self.cameras = tuple(dict.fromkeys((*(self._classifier.cameras if self._classifier else ()), *outcome.cameras)))
        """Cameras whose frames are looked at on every tick."""

    def verdict(
        self,
        tick: int,
        look: Callable[[Sequence[str]], Observation],
        reward: float,
        terminated: bool,
        info: Mapping[str, Any],
    ) -> Verdict:
        """Judge a tick.

        Args:
            tick: of the episode; 0 begins one.
            look: returns the observation after the tick, with the frames of the cameras that it is given.
            reward, terminated, info: of the environment.

        Raises:
            ConfigError: a function returns something else than a truth value.
        """
        if tick == 0 and self._classifier is not None:
            self._classifier.reset()
        if info.get("success"):
            return Verdict(reward, True, Outcome.SUCCESS, "environment")
        if info.get("failure"):
            return Verdict(self._failure_reward, True, Outcome.FAILURE, "environment")
        if not terminated and (by := self._success_by(look)):
            return Verdict(reward + 1.0, True, Outcome.SUCCESS, by)
        return Verdict(reward, terminated, Outcome.UNKNOWN, "environment")

    def labelled(self, outcome: Outcome | None, reward: float) -> Verdict | None:
        """Return the verdict of an operator's label, which goes before all others; None without one."""
        if outcome is None:
            return None
        success = outcome is Outcome.SUCCESS
        return Verdict(max(reward, 1.0) if success else self._failure_reward, True, outcome, OPERATOR)

    def _success_by(self, look: Callable[[Sequence[str]], Observation]) -> str:
        """Return who finds a success in the observation, the classifier first; empty: there is none."""
        classifier = self._classifier
        condition = self._condition
        if classifier is not None and condition is not None and not _truth(condition(look(())), CONDITION):
            classifier.reset()
            classifier = None
        if classifier is None and self._success is None:
            return ""
        # One look for both: two would read a camera twice.
        observation = look(self.cameras)
        if classifier is not None and classifier.success(observation):
            return CLASSIFIER
        if self._success is None:
            return ""
        given = {key: value for key, value in observation.items() if key in self._given}
        return FUNCTION if _truth(self._success(given), FUNCTION) else ""


def _truth(value: Any, parameter: str) -> bool:
    try:
        return bool(value)
    except (TypeError, ValueError) as e:  # as of an array of several
        text = f"must return True or False, got {value!r}: {e}. Reduce it, as by all()"
        raise ConfigError(text, parameter=parameter) from e

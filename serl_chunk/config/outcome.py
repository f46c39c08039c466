"""What ends an episode as a success or a failure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from serl_chunk.config.fields import Group, Requirement, optional, require, setting, shaping
from serl_chunk.types import Observation

_JUDGED = Requirement("outcome.success", lambda c: c.outcome.success is not None)
_CLASSIFIED = Requirement("outcome.classifier", lambda c: bool(c.outcome.classifier))
_STAGED = Requirement("outcome.stages with a chain of several classes", lambda c: c.outcome.longest > 1)


@dataclasses.dataclass(frozen=True)
class OutcomeConfig(Group, path="outcome."):
    """The actor asks these after each tick, in the order of docs/classifier.md; the learner never does."""

    success: Callable[[Observation], bool] | None = setting(
        None, "in place of a classifier: success(observation) ends the episode with reward 1"
    )
    cameras: tuple[str, ...] = optional(
        (), "whose frames outcome.success gets on every tick, with the state", requires=_JUDGED
    )
    classifier: str = setting(
        "", "folder of `serl-chunk classifier train`, at the actor: its success ends the episode with reward 1"
    )
    condition: Callable[[Observation], bool] | None = optional(
        None,
        "condition(observation) on the state, which must hold too on each frame that the classifier counts",
        requires=_CLASSIFIED,
    )
    environment: bool = setting(
        True,
        "the environment's success, failure and reward count; False: they are recorded with the episode's end alone",
    )
    stages: tuple[str, ...] = optional(
        (),
        "chains of its classes, as grasped>placed: one that is seen in its order is a success; empty: the last class",
        requires=_CLASSIFIED,
    )
    stage_reward: float = optional(
        0.0,
        "when a class before the last one of a chain is first seen, added to the environment's reward; below 1",
        least=0,
        requires=_STAGED,
    )
    observed: tuple[str, ...] = shaping((), "its classes that are appended to the state, 1 for the likeliest class")

    @property
    def chains(self) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(name.strip() for name in chain.split(">")) for chain in self.stages)

    @property
    def longest(self) -> int:
        return max(map(len, self.chains), default=1)

    def _check(self) -> None:
        # fmt: off
        for name in ("success", "condition"):
            function = getattr(self, name)
            require(function is None or callable(function), f"outcome.{name}",
                f"must be a callable {name}(observation) -> bool, or none, got {function!r}")
        require(self.success is None or not self.classifier, "outcome.success",
            f"decides in place of a classifier, and outcome.classifier is {self.classifier!r}. Leave one of them out; "
            "what the state has to show in addition is outcome.condition")
        require(self.environment or bool(self.classifier) or self.success is not None, "outcome.environment",
            "False leaves nothing that finds a success. Give outcome.classifier or outcome.success")
        require(all(all(chain) for chain in self.chains), "outcome.stages",
            f"must be names of classes with > between them, got {self.stages}")
        require(self.stage_reward < 1, "outcome.stage_reward",
            f"must be below 1, the reward of a success, got {self.stage_reward:g}. Raise reward.scale for larger ones")
        require(len({*self.observed}) == len(self.observed), "outcome.observed",
            f"must be different names, got {self.observed}")

"""What ends an episode as a success, in addition to the environment."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from serl_chunk.config.fields import Group, Requirement, require, setting
from serl_chunk.types import Observation

_JUDGED = Requirement("outcome.success", lambda c: c.outcome.success is not None)
_CLASSIFIED = Requirement("outcome.classifier", lambda c: bool(c.outcome.classifier))


@dataclasses.dataclass(frozen=True)
class OutcomeConfig(Group, path="outcome."):
    """The actor asks these after each tick; the learner never does."""

    success: Callable[[Observation], bool] | None = setting(
        None,
        "success(observation) ends the episode with reward 1; none: the environment decides alone",
        acts="",
    )
    cameras: tuple[str, ...] = setting(
        (), "whose frames outcome.success gets on every tick, with the state", acts="", requires=_JUDGED, off=()
    )
    classifier: str = setting(
        "",
        "folder of `serl-chunk classifier train`, at the actor: its success ends the episode with reward 1",
        acts="",
    )
    condition: Callable[[Observation], bool] | None = setting(
        None,
        "condition(observation) on the state, which must hold too on each frame that the classifier counts",
        acts="",
        requires=_CLASSIFIED,
        off=None,
    )

    def _check(self) -> None:
        # fmt: off
        for name in ("success", "condition"):
            function = getattr(self, name)
            require(function is None or callable(function), f"outcome.{name}",
                f"must be a callable {name}(observation) -> bool, or none, got {function!r}")

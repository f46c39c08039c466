"""How observations and chunks enter model space."""

from __future__ import annotations

import dataclasses
from typing import Literal

from serl_chunk.config.validation import require, require_choices


@dataclasses.dataclass(frozen=True)
class NormaliserConfig:
    """How observations and chunks enter model space (docs/architecture.md, section 3)."""

    actions: Literal["absolute_range", "absolute_demo", "relative", "norm_stats"] = "relative"
    state: bool = True  # mean/std of the demonstrations; False leaves states as they are
    norm_stats: str = ""  # a norm_stats.json instead of the demonstrations; read by the learner
    state_std_floor: float = 0.01
    action_scale_floor: float = 0.02  # in robot units; keeps a dimension the demonstrations never move from exploding
    extreme: float = 0.9  # where the demonstrations' extremes land, so that a tanh policy can express them

    def __post_init__(self) -> None:
        require_choices(self, "normaliser.")
        require(
            bool(self.norm_stats) or self.actions != "norm_stats",
            "normaliser.actions=norm_stats needs normaliser.norm_stats: the file that `serl-chunk data stats` writes",
        )
        require(
            not self.norm_stats or self.state or self.actions == "norm_stats",
            "normaliser.norm_stats would not be read: set normaliser.state, or normaliser.actions=norm_stats",
        )
        require(0 < self.extreme <= 1, f"normaliser.extreme must be in (0, 1], got {self.extreme}")
        require(self.state_std_floor > 0, f"normaliser.state_std_floor must be positive, got {self.state_std_floor}")
        require(
            self.action_scale_floor > 0,
            f"normaliser.action_scale_floor must be positive, got {self.action_scale_floor}",
        )

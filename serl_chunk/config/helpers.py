"""Settings of simulated people."""

from __future__ import annotations

import dataclasses
import math

from serl_chunk.config.validation import require


@dataclasses.dataclass(frozen=True)
class HelperConfig:
    """The scripted person of the fake ALOHA task (`actor.intervention="scripted"`), faults included."""

    stall_ticks: int = 15  # without progress before the person starts to react
    reaction_ticks: tuple[int, ...] = (10, 25)  # delay from there to the take-over, drawn uniformly, both included
    correction_ticks: tuple[int, ...] = (20, 44)  # length of a correction, drawn uniformly, both included
    speed: tuple[float, ...] = (0.6, 0.9)  # share of the joint rate limit, drawn uniformly for each correction
    noise: float = 0.02  # radians; the demonstrators' is 0.01
    miss_rate: float = 0.0  # share of the occasions to take over that the person does not notice
    fault_rate: float = 0.0  # share of the corrections that are fumbled: the fingers do the opposite

    def __post_init__(self) -> None:
        require(self.stall_ticks >= 1, f"robot.helper.stall_ticks must be at least 1, got {self.stall_ticks}")
        for name, least in (("reaction_ticks", 0), ("correction_ticks", 1)):
            value = getattr(self, name)
            require(
                len(value) == 2 and least <= value[0] <= value[1],
                f"robot.helper.{name} must be two numbers of ticks, the least (>= {least}) and the most, got {value}",
            )
        require(
            len(self.speed) == 2 and 0 < self.speed[0] <= self.speed[1] <= 1,
            f"robot.helper.speed must be two shares in (0, 1], the least and the most, got {self.speed}",
        )
        require(0 <= self.noise < math.inf, f"robot.helper.noise must be >= 0 radians and finite, got {self.noise}")
        for name in ("miss_rate", "fault_rate"):
            require(
                0 <= getattr(self, name) <= 1, f"robot.helper.{name} must be a share in 0..1, got {getattr(self, name)}"
            )

"""Settings of policy improvement by climbing the critic (docs/algorithms/improvement.md)."""

from __future__ import annotations

import dataclasses
import math

from serl_chunk.config.validation import require


@dataclasses.dataclass(frozen=True)
class ImproveConfig:
    """Chunks that the critic chose take a few gradient steps on it before they act (PA-RL, Mark et al. 2024)."""

    steps: int = 0  # gradient steps m; 0 switches it all off
    top: int = 4  # k: how many of the candidates climb, the best ones; all where there are fewer
    rate: float = 0.02  # length of a step in model space: what the action with the steepest slope moves by
    radius: float = 0.1  # how far any action may get from where it started, per dimension, in model space
    imitate: float = 0.0  # weight of imitating improved chunks beside the data (acfql, best-of-n); 0: they only act
    candidates: int = 8  # N that imitated chunks are chosen from, for imitate > 0

    def __post_init__(self) -> None:
        for name, least in (("steps", 0), ("top", 1), ("candidates", 1)):
            value = getattr(self, name)
            require(value >= least, f"agent.improve.{name} must be at least {least}, got {value}")
        require(0 < self.rate < math.inf, f"agent.improve.rate must be positive, got {self.rate}")
        require(
            0 < self.radius <= 2,
            f"agent.improve.radius must be in (0, 2], got {self.radius}: model space reaches from -1 to 1",
        )
        require(
            0 <= self.imitate < math.inf, f"agent.improve.imitate must be >= 0 (0 switches it off), got {self.imitate}"
        )
        require(
            self.imitate == 0 or self.steps > 0,
            "agent.improve.imitate would imitate chunks that nothing improved: set agent.improve.steps, or imitate=0",
        )

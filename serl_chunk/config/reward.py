"""How recorded rewards become those that are trained on, and which returns follow from that."""

from __future__ import annotations

import dataclasses
import math

from serl_chunk.config.validation import require


def return_for_ever(reward: float, discount: float) -> float:
    """The discounted sum of `reward` on every tick from now on."""
    return reward / (1 - discount)


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    """The one place where rewards are changed; applies to online data and demonstrations alike."""

    scale: float = 1.0
    offset: float = 0.0  # added to every step's scaled reward
    failure_reward: float = 0.0  # reward of the step on which a declared failure ends the episode
    intervention_penalty: float = 0.0  # subtracted from the effective reward of the last step before a take-over

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            require(math.isfinite(value), f"reward.{field.name} must be a finite number, got {value}")
        require(
            self.intervention_penalty >= 0,
            f"reward.intervention_penalty must be >= 0 (it is subtracted), got {self.intervention_penalty}",
        )


def possible_returns(reward: RewardConfig, discount: float) -> tuple[float, float]:
    """The least and the greatest discounted return from any step on, for recorded rewards of 0, and 1 at a success.

    k steps of the offset c and an end e return c (1 - gamma^k) / (1 - gamma) + gamma^k e, which lies between e and
    c / (1 - gamma); e is a success, a declared failure, or none (a truncated episode counts as going on for ever).
    One take-over costs its penalty; an episode with several may return less, which a critic of a range does not tell.
    """
    ends = return_for_ever(reward.offset, discount), reward.scale + reward.offset, reward.failure_reward
    return min(ends) - reward.intervention_penalty, max(ends)

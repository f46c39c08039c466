"""Settings of critics."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from serl_chunk.config.validation import require, require_choices, require_widths

Aggregate = Literal["mean", "min"]
Floor = Literal["none", "mc"]
Activation = Literal["relu", "gelu"]

SIGMAS = 3.0  # deviations of a target's Gaussian that bins reach beyond the range, for hl_gauss


@dataclasses.dataclass(frozen=True)
class CriticConfig:
    """An ensemble of chunk critics Q_k(o, a_0..a_{H-1})."""

    hidden: tuple[int, ...] = (256, 256)
    ensemble: int = 10  # RLPD's K
    target_subset: int = 2  # REDQ: heads aggregated in a target; equal to `ensemble` to use them all
    target_aggregate: Aggregate = "min"
    # bounded: Q is a sigmoid within [value_low, value_high]; hl_gauss: the mean of `bins` classes over that range. Both
    # by cross-entropy, and both need a range that holds every return (docs/algorithms/critic.md).
    loss: Literal["squared", "bounded", "hl_gauss"] = "squared"
    value_low: float = 0.0  # least return, for bounded and hl_gauss
    value_high: float = 1.0  # greatest return, for bounded and hl_gauss
    bins: int = 101  # outputs of each head, for hl_gauss
    sigma_bins: float = 0.75  # deviation of the target's Gaussian in widths of a bin, for hl_gauss (as published)
    # A fresh Q lies at the share sigmoid(initial_logit) of the range, about 0.12, for bounded and hl_gauss.
    initial_logit: float = -2.0
    # mc: a demonstration's target is at least the return that was realised from there to its termination.
    target_floor: Floor = "none"
    tau: float = 0.005  # target <- tau * critic + (1 - tau) * target, after the gradient step
    tail: Literal["repeat", "policy"] = "repeat"  # what the critic sees as actions after a termination
    activation: Activation = "relu"  # gelu is FQL's (tanh approximation)
    layer_norm: Literal["before", "after", "none"] = "before"  # the activation; after is FQL's
    # The target moves towards the critic of after the gradient step; "old": towards the one before (Q-chunking's code).
    target_average: Literal["new", "old"] = "new"

    def __post_init__(self) -> None:
        require_choices(self, "agent.critic.")
        require(self.ensemble >= 1, f"agent.critic.ensemble must be at least 1, got {self.ensemble}")
        require(
            1 <= self.target_subset <= self.ensemble,
            f"agent.critic.target_subset must be 1..{self.ensemble} (ensemble), got {self.target_subset}",
        )
        require(
            math.isfinite(self.value_low) and math.isfinite(self.value_high) and self.value_low < self.value_high,
            "agent.critic.value_low must be below agent.critic.value_high, and both finite: they are the least and "
            f"the greatest return; got {self.value_low} and {self.value_high}",
        )
        require(
            math.isfinite(self.initial_logit), f"agent.critic.initial_logit must be finite, got {self.initial_logit}"
        )
        # Narrower than half a bin the mean of the classes is no longer the target.
        require(
            0.5 <= self.sigma_bins < math.inf, f"agent.critic.sigma_bins must be at least 0.5, got {self.sigma_bins}"
        )
        least = 2 * math.ceil(SIGMAS * self.sigma_bins) + 2
        require(
            self.bins >= least,
            f"agent.critic.bins must be at least {least} with agent.critic.sigma_bins={self.sigma_bins:g} (the "
            f"Gaussian needs {SIGMAS:g} deviations beyond either end of the range), got {self.bins}",
        )
        require(0 < self.tau <= 1, f"agent.critic.tau must be in (0, 1], got {self.tau}")
        require_widths("agent.critic.hidden", self.hidden)

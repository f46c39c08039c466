"""Settings of critics."""

from __future__ import annotations

import dataclasses
from typing import Literal

from serl_chunk.config.validation import require, require_choices, require_widths

Aggregate = Literal["mean", "min"]
Activation = Literal["relu", "gelu"]


@dataclasses.dataclass(frozen=True)
class CriticConfig:
    """An ensemble of chunk critics Q_k(o, a_0..a_{H-1})."""

    hidden: tuple[int, ...] = (256, 256)
    ensemble: int = 10  # RLPD's K
    target_subset: int = 2  # REDQ: heads aggregated in a target; equal to `ensemble` to use them all
    target_aggregate: Aggregate = "min"
    loss: Literal["squared", "bounded"] = (
        "squared"  # bounded: Q = sigmoid(logit), cross-entropy; needs returns in [0, 1]
    )
    initial_logit: float = -2.0  # bias of the bounded critic's logit: a fresh Q is about 0.12
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
        require(0 < self.tau <= 1, f"agent.critic.tau must be in (0, 1], got {self.tau}")
        require_widths("agent.critic.hidden", self.hidden)

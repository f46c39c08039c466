"""Settings of critics."""

from __future__ import annotations

import dataclasses
from typing import Literal, cast

from serl_chunk.config.fields import Group, acting, require, setting, shaping, widths

Aggregate = Literal["mean", "min"]
Activation = Literal["relu", "tanh"]

INITIAL_LOGIT = -2.0  # a new Q of a known range lies at the share sigmoid(this) of it


@dataclasses.dataclass(frozen=True)
class CriticConfig(Group, path="agent.critic."):
    """An ensemble of chunk critics Q_k(o, a_0..a_{H-1}), whose mean counts (docs/algorithms/critic.md)."""

    hidden: tuple[int, ...] = widths((256, 256), "widths of the hidden layers")
    ensemble: int = shaping(4, "critics in the ensemble", least=1)
    tau: float = setting(0.01, "target <- tau * critic + (1 - tau) * target, after the update", above=0, most=1)

    target_aggregate = cast(Aggregate, "mean")  # of the heads in a target, and where candidates are compared
    activation = cast(Activation, "relu")

    @property
    def target_subset(self) -> int:
        """Heads that are aggregated in a target, drawn anew each time: all."""
        return self.ensemble


@dataclasses.dataclass(frozen=True)
class SacCriticConfig(CriticConfig):
    """The critics of RLPD (Ball et al. 2023), of Q-chunking's RLPD and of HIL-SERL."""

    ensemble: int = 10
    target_subset: int = setting(2, "heads aggregated in a target (REDQ); equal to `ensemble` to use them all", least=1)
    target_aggregate: Aggregate = acting("min", "aggregate of these heads, and of all where candidates are compared")
    tau: float = 0.005
    activation: Activation = acting("relu", "tanh is HIL-SERL's")

    def _check(self) -> None:
        require(self.target_subset <= self.ensemble, "agent.critic.target_subset",
            f"must be 1..{self.ensemble} (agent.critic.ensemble), got {self.target_subset}")  # fmt: skip

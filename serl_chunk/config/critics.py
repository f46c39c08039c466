"""Settings of critics."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from serl_chunk.config.fields import Group, acting, derived, needs, require, setting, shaping, widths

Aggregate = Literal["mean", "min"]
Floor = Literal["none", "mc"]
Activation = Literal["relu", "tanh"]

SIGMAS = 3.0  # deviations of a target's Gaussian that bins reach beyond the range, for hl_gauss
# Narrower than half a bin the mean of the classes is no longer the target; this is the published width.
SIGMA_BINS = 0.75  # deviation of the target's Gaussian, in bins
INITIAL_LOGIT = -2.0  # a new Q lies at the share sigmoid(this) of the range
LEAST_BINS = 2 * math.ceil(SIGMAS * SIGMA_BINS) + 2
_RANGED = needs("agent.critic.loss", "bounded", "hl_gauss")
_BINS = needs("agent.critic.loss", "hl_gauss")


@dataclasses.dataclass(frozen=True)
class CriticConfig(Group, path="agent.critic."):
    """An ensemble of chunk critics Q_k(o, a_0..a_{H-1}) (docs/algorithms/critic.md)."""

    hidden: tuple[int, ...] = widths((256, 256), "widths of the hidden layers")
    ensemble: int = shaping(10, "critics in the ensemble, RLPD's K", least=1)
    target_subset: int = setting(2, "heads aggregated in a target (REDQ); equal to `ensemble` to use them all", least=1)
    target_aggregate: Aggregate = acting("min", "aggregate of these heads, and of all where candidates are compared")
    # bounded and hl_gauss are trained by cross-entropy and need a range that holds every return.
    loss: Literal["squared", "bounded", "hl_gauss"] = derived(
        "squared",
        "squared; bounded: Q is a sigmoid within [value_low, value_high]; hl_gauss: the mean of `bins` classes over it",
    )
    value_low: float = derived(0.0, "least return", requires=_RANGED)
    value_high: float = derived(1.0, "greatest return", requires=_RANGED)
    bins: int = shaping(101, "outputs of each head", requires=_BINS)
    target_floor: Floor = setting("none", "mc: a demonstration's target is at least its realised return")
    tau: float = setting(0.005, "target <- tau * critic + (1 - tau) * target, after the update", above=0, most=1)
    activation: Activation = acting("relu", "tanh is HIL-SERL's")
    layer_norm: Literal["before", "none"] = acting("before", "layer norm before each activation, or none")

    def _check(self) -> None:
        # fmt: off
        require(self.target_subset <= self.ensemble, "agent.critic.target_subset",
            f"must be 1..{self.ensemble} (agent.critic.ensemble), got {self.target_subset}")
        require(self.value_low < self.value_high, "agent.critic.value_low",
            f"the least return must be below agent.critic.value_high={self.value_high}, got {self.value_low}")
        require(self.bins >= LEAST_BINS, "agent.critic.bins",
            f"must be at least {LEAST_BINS}, got {self.bins}: the Gaussian needs {SIGMAS:g} deviations of "
            f"{SIGMA_BINS:g} bins beyond either end of the range")

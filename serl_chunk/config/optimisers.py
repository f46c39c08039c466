"""Settings of optimisers: Adam for the policy, and what differs for the critic and for image and text encoders."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from serl_chunk.config.fields import Group, require, setting


class Optimiser(NamedTuple):
    """Adam with decoupled weight decay (AdamW) of one component: the policy's network, the critic's, or encoders."""

    lr: float
    lr_warmup: int  # gradient steps in which the rate rises to `lr`
    lr_cosine: int  # gradient steps after which it has fallen to a tenth; 0: it stays
    weight_decay: float
    grad_clip: float  # of the component's gradient norm; 0: none


@dataclasses.dataclass(frozen=True)
class OptimiserConfig(Group):
    """What a component has of its own; none: as the policy."""

    lr: float | None = setting(None, "learning rate; none: agent.lr", above=0)
    lr_warmup: int | None = setting(None, "none: agent.lr_warmup", unit="updates", least=0)
    lr_cosine: int | None = setting(None, "none: agent.lr_cosine", unit="updates", least=0)
    weight_decay: float | None = setting(None, "none: agent.weight_decay", least=0)
    grad_clip: float | None = setting(None, "norm of its gradient alone; none: agent.grad_clip", least=0)

    def resolved(self, policy: Optimiser) -> Optimiser:
        """Return the component's optimiser. Raises ConfigError where it would rise longer than it falls."""
        own = (self.lr, self.lr_warmup, self.lr_cosine, self.weight_decay, self.grad_clip)
        both = Optimiser(*(of if mine is None else mine for mine, of in zip(own, policy, strict=True)))  # type: ignore[arg-type]
        check_schedule(both, self.PATH)
        return both


class CriticOptimiserConfig(OptimiserConfig, path="agent.critic_optimiser."):
    """The critic's."""


class EncoderOptimiserConfig(OptimiserConfig, path="agent.encoder_optimiser."):
    """That of image, text and state encoders, in the policy and in the critic."""


def check_schedule(optimiser: Optimiser, path: str) -> None:
    """Raise ConfigError for a rate that has fallen before it has risen."""
    # fmt: off
    require(not optimiser.lr_cosine or optimiser.lr_cosine > optimiser.lr_warmup, f"{path}lr_cosine",
        f"must be above {path}lr_warmup={optimiser.lr_warmup}, or 0 for a rate that stays, got {optimiser.lr_cosine}")

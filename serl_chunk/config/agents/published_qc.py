"""The agents of Q-chunking's published code, in its conventions and under its names of settings (`--compat qc`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

from serl_chunk.config.agents.base import ActorCriticConfig, Optimiser
from serl_chunk.config.agents.critic import Aggregate, SacCriticConfig
from serl_chunk.config.fields import acting, needs, require, setting, shaping, widths

WIDTHS = (512, 512, 512, 512)  # of every published network
_FLOW, _GAUSSIAN = needs("agent.agent_name", "acfql"), needs("agent.agent_name", "acrlpd")
_BEST_OF_N = (_FLOW, needs("agent.actor_type", "best-of-n"))
_DISTILLED = (_FLOW, needs("agent.actor_type", "distill-ddpg"))
# Settings of our agents that the published code does not have; the class gives their values.
_FIXED = ("encoder_lr", "critic_lr", "critic", "candidates", "policy_ema", "bc_on", "bc_joint_noise")


@dataclasses.dataclass(frozen=True)
class PublishedQcConfig(ActorCriticConfig, without=_FIXED):
    """ACFQL or ACRLPD as Q-chunking's code has them (Li, Zhou and Levine 2025); the defaults are its own."""

    kind: ClassVar[str] = "published_qc"
    CALLED: ClassVar[Mapping[str, str]] = {
        "candidates": "actor_num_samples", "target_candidates": "actor_num_samples",
        "hidden": "actor_hidden_dims", "init_temperature": "init_temp",
        "target_entropy_per_dim": "target_entropy_multiplier", "flow": "flow_steps", "critic": "num_qs",
    }  # fmt: skip

    agent_name: Literal["acfql", "acrlpd"] = shaping(
        "acfql", "the policy: a flow (QC, QC-FQL), or a Gaussian (RLPD-AC)"
    )
    num_qs: int = shaping(2, "critics; published: 2 for acfql, 10 for acrlpd", least=1)
    q_agg: Aggregate = acting("mean", "of the critics in a target, and where candidates are compared")
    weight_decay: float = setting(0.0, "AdamW's, of every network, without the temperature; 0: Adam", least=0)
    tau: float = setting(0.005, "share of the critic in its target, from before the update", above=0, most=1)
    value_hidden_dims: tuple[int, ...] = widths(WIDTHS, "widths of the critics' hidden layers")
    layer_norm: bool = shaping(True, "layer norm in the critics: after the activation in acfql, before it in acrlpd")
    actor_hidden_dims: tuple[int, ...] = widths(WIDTHS, "widths of the policy's hidden layers")
    actor_layer_norm: bool = shaping(False, "layer norm after each activation of the flow's networks", requires=_FLOW)
    flow_steps: int = acting(10, "Euler steps", least=1, requires=_FLOW)
    use_fourier_features: bool = shaping(False, "t enters the flow as sines and cosines, or alone", requires=_FLOW)
    fourier_feature_dim: int = shaping(
        64, "how many, even", least=4, requires=(_FLOW, needs("agent.use_fourier_features", True))
    )
    actor_type: Literal["best-of-n", "distill-ddpg"] = shaping(
        "distill-ddpg", "what acts: the best of N flow samples, or a one-step policy near the flow", requires=_FLOW
    )
    actor_num_samples: int = acting(32, "N of best-of-N, acting and in the target", least=1, requires=_BEST_OF_N)
    alpha: float = setting(100.0, "weight of the distillation", least=0, requires=_DISTILLED)
    bc_alpha: float = setting(0.0, "weight of -log pi(chunk of the data); QC-RLPD: 0.01", least=0, requires=_GAUSSIAN)
    init_temp: float = setting(1.0, "initial temperature of the entropy term", above=0, requires=_GAUSSIAN)
    target_entropy_multiplier: float = setting(
        0.5, "the target entropy is -this for each of the H*A dimensions", requires=_GAUSSIAN
    )

    # What the code does in any case, as our agents and other rooms read it.
    encoder_lr = critic_lr = None
    kernel_init = "xavier_uniform"
    policy_ema = 0.0
    bc_on = "all"
    bc_joint_noise = 0.0
    imitates_all_rows = True
    own_policy_batch = False

    @property  # type: ignore[misc]
    def critic(self) -> SacCriticConfig:
        """The critics of this agent, but for the order of their layers."""
        return SacCriticConfig(
            hidden=self.value_hidden_dims, ensemble=self.num_qs, target_subset=self.num_qs,
            target_aggregate=self.q_agg, tau=self.tau,
        )  # fmt: skip

    @property
    def best_of_n(self) -> bool:
        return (self.agent_name, self.actor_type) == ("acfql", "best-of-n")

    @property  # type: ignore[misc]
    def candidates(self) -> int:  # type: ignore[override]
        """Samples of the policy that are compared in a decision, and in a target."""
        return self.actor_num_samples if self.best_of_n else 1

    def optimiser(self, network: Literal["policy", "critic"] = "policy") -> Optimiser:
        return super().optimiser(network)._replace(weight_decay=self.weight_decay)

    @property
    def squashed(self) -> bool:
        return self.agent_name == "acrlpd"

    def _check(self) -> None:
        require(self.fourier_feature_dim % 2 == 0, "agent.fourier_feature_dim",
            f"must be even, got {self.fourier_feature_dim}")  # fmt: skip

"""Settings of acrlpd."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

from serl_chunk.config.agents.base import ActorCriticConfig, KernelInit
from serl_chunk.config.agents.critic import Activation, SacCriticConfig
from serl_chunk.config.agents.gripper import GripperConfig, SacGripperConfig
from serl_chunk.config.fields import acting, setting, shaping, widths


@dataclasses.dataclass(frozen=True)
class AcrlpdConfig(ActorCriticConfig):
    """SAC/RLPD on flattened chunks (RLPD, Ball et al. 2023). Horizon 1 is plain RLPD."""

    kind: ClassVar[str] = "acrlpd"

    critic: SacCriticConfig = setting(SacCriticConfig, "the critic")
    gripper: GripperConfig = setting(SacGripperConfig, "discrete or fixed grippers")
    kernel_init: KernelInit = setting("lecun_normal", "xavier is RLPD's and HIL-SERL's")
    candidates: int = 1  # RLPD's; the policy's loss and temperature are those of one sample
    hidden: tuple[int, ...] = widths((256, 256), "widths of the policy's hidden layers")
    bc_alpha: float = setting(0.01, "weight of -log pi(demonstrated chunk), per dimension (QC-RLPD)", least=0)
    init_temperature: float = setting(0.01, "initial temperature of the entropy term", above=0)
    target_entropy_per_dim: float = setting(-0.5, "target entropy of one of the H*A dimensions")
    # RLPD's published target adds entropy; it drowns Q <= 1 as H grows.
    backup_entropy: bool = setting(False, "the target adds the policy's entropy")
    policy_activation: Activation = acting("relu", "of the policy's network; tanh is HIL-SERL's")
    policy_layer_norm: bool = shaping(True, "layer norm in the policy's network; False is RLPD's and Q-chunking's")
    log_prob: Literal["mean", "sum"] = setting("mean", "over the H*A dimensions; sum is the published convention")
    log_std_min: float = acting(-10.0, "least log deviation before tanh; -20 is RLPD's and Q-chunking's", below=2)

    @property
    def as_published(self) -> dict[str, Any]:
        return {
            **super().as_published, "agent_name": "acrlpd", "actor_hidden_dims": self.hidden, "bc_alpha": self.bc_alpha,
            "target_entropy_multiplier": -self.target_entropy_per_dim,
        }  # fmt: skip

    @property
    def squashed(self) -> bool:
        return True

"""Settings of bc."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

from serl_chunk.config.agents.policy import PolicyConfig
from serl_chunk.config.fields import needs, require, setting, shaping, widths

_GAUSSIAN = needs("agent.policy", "gaussian", note="the flow's layers are agent.flow.hidden")


@dataclasses.dataclass(frozen=True)
class BcConfig(PolicyConfig):
    """Behaviour cloning, by flow matching or with a Gaussian; on demonstrations and interventions it is HG-DAgger."""

    kind: ClassVar[str] = "bc"

    policy: Literal["flow", "gaussian", "pi0"] = shaping("flow", "the kind of policy")  # type: ignore[assignment]
    hidden: tuple[int, ...] = widths(
        (256, 256), "widths of the Gaussian policy's hidden layers (TanhNormal)", requires=_GAUSSIAN
    )
    policy_updates: int = setting(3, "policy updates per update, with the same batch and new noise", least=1)

    def _check(self) -> None:
        # fmt: off
        require(self.encoder.trained_by != "critic", "agent.encoder.trained_by",
            f"critic leaves the encoder untrained, for {self.kind} has no critic. Set it to each "
            "(agent.encoder.frozen_backbone keeps pretrained convolutions).")

    @property
    def as_published(self) -> dict[str, Any]:
        require(self.acts_by_flow, "compat",
            f"Q-chunking's code has no bc with agent.policy={self.policy}. Use acfql, acrlpd, or bc with "
            "agent.policy=flow.")  # fmt: skip
        # The flow of QC with one candidate, whose critic decides nothing.
        return {**self.flow.as_published, "actor_num_samples": 1, "value_hidden_dims": self.flow.hidden}

    @property
    def squashed(self) -> bool:
        return self.policy == "gaussian"

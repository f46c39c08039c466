"""Settings of bc."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

from serl_chunk.config.agents.base import AgentConfig, Optimiser
from serl_chunk.config.agents.encoder import EncoderConfig
from serl_chunk.config.agents.flow import FlowConfig
from serl_chunk.config.agents.pi0 import Pi0Config
from serl_chunk.config.fields import as_text, needs, require, setting, shaping, widths

_BY_FLOW = needs("agent.policy", "flow", note="the Gaussian's layers are agent.hidden")
_GAUSSIAN = needs("agent.policy", "gaussian", note="the flow's layers are agent.flow.hidden")
_PI0 = needs("agent.policy", "pi0")


@dataclasses.dataclass(frozen=True)
class BcConfig(AgentConfig):
    """Behaviour cloning, by flow matching or with a Gaussian; on demonstrations and interventions it is HG-DAgger."""

    kind: ClassVar[str] = "bc"

    policy: Literal["flow", "gaussian", "pi0"] = shaping("flow", "the kind of policy")
    flow: FlowConfig = setting(FlowConfig, "the flow policy", requires=_BY_FLOW)
    pi0: Pi0Config = setting(Pi0Config, "pi0", requires=_PI0)
    hidden: tuple[int, ...] = widths(
        (256, 256), "widths of the Gaussian policy's hidden layers (TanhNormal)", requires=_GAUSSIAN
    )
    policy_ema: float = 0.999
    policy_updates: int = setting(3, "policy updates per update, with the same batch and new noise", least=1)

    def _check(self) -> None:
        # fmt: off
        if self.as_pi0:
            self._check_pi0()
        require(self.encoder.trained_by != "critic", "agent.encoder.trained_by",
            f"critic leaves the encoder untrained, for {self.kind} has no critic. Set it to each "
            "(agent.encoder.frozen_backbone keeps pretrained convolutions).")

    def _check_pi0(self) -> None:
        # fmt: off
        pi0, most = self.pi0, len(self.pi0.cameras)
        require(len(self.image_keys) <= most, "agent.image_keys",
            f"must be at most {most} cameras, in the order of agent.pi0.cameras={','.join(pi0.cameras)}, got "
            f"{','.join(self.image_keys)}")
        require(bool(self.image_keys) or self.language.reads, "agent.image_keys",
            "empty leaves pi0 without an input: it reads cameras and a text. Name cameras, or set "
            "agent.language.tokenizer.")
        require(not self.image_keys or self.encoder.frame_size == pi0.image_size, "agent.encoder.frame_size",
            f"must be agent.pi0.image_size={as_text(pi0.image_size)} with agent.policy=pi0, got "
            f"{as_text(self.encoder.frame_size)}")
        require(self.language.vocabulary <= pi0.vocabulary, "agent.pi0.vocabulary",
            f"must be at least the {self.language.vocabulary} of agent.language.tokenizer={self.language.tokenizer}, "
            f"got {pi0.vocabulary}")
        require(self.gripper.composition == "continuous", "agent.gripper.choices",
            "must be empty with agent.policy=pi0, whose actions include the grippers. Leave it out.")
        require(pi0.trainable != "none", "agent.pi0.trainable",
            f"none leaves {self.kind} nothing to train. Set full, expert, lora or lora_expert.")
        require(self.use_state, "agent.use_state",
            "must be True with agent.policy=pi0, which reads the state. Leave it out.")
        unread = dataclasses.replace(self.encoder, frame_size=None, shift=EncoderConfig().shift)
        for field in dataclasses.fields(EncoderConfig):
            value, usual = getattr(unread, field.name), getattr(EncoderConfig(), field.name)
            require(value == usual, f"agent.encoder.{field.name}",
                f"{as_text(value)} has no effect: pi0 has an image tower of its own. Leave it out.")
        require(not pi0.reads_bins or self.language.reads, "agent.language.tokenizer",
            "must not be none with agent.pi0.pi05=True, which reads the state in its prompt alone. Set bytes or "
            "sentencepiece.")
        require(not pi0.pi05 or not self.joint_noise, "agent.bc_joint_noise",
            "must be 0 with agent.pi0.pi05=True, which reads no measured joints, or the recorded ones in its prompt; "
            f"got {self.joint_noise:g}.")

    @property
    def acts_by_flow(self) -> bool:
        return self.policy == "flow"

    @property
    def samples_delay(self) -> bool:
        return self.flow.train_delay == "sampled"

    @property
    def as_pi0(self) -> Pi0Config | None:
        return self.pi0 if self.policy == "pi0" else None

    @property
    def as_published(self) -> dict[str, Any]:
        require(self.acts_by_flow, "compat",
            f"Q-chunking's code has no bc with agent.policy={self.policy}. Use acfql, acrlpd, or bc with "
            "agent.policy=flow.")  # fmt: skip
        # The flow of QC with one candidate, whose critic decides nothing.
        return {**self.flow.as_published, "actor_num_samples": 1, "value_hidden_dims": self.flow.hidden}

    @property
    def reads_bins(self) -> bool:
        return self.as_pi0 is not None and self.pi0.reads_bins

    @property
    def squashed(self) -> bool:
        return self.policy == "gaussian"

    def optimiser(self, network: Literal["policy", "critic"] = "policy") -> Optimiser:
        own = super().optimiser(network)
        return self.pi0.schedule(own) if self.as_pi0 else own

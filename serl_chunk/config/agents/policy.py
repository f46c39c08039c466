"""Settings of agents whose policy is chosen: a flow of ours, pi0, or for some a distribution."""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

from serl_chunk.config.agents.base import AgentConfig, Optimiser
from serl_chunk.config.agents.encoder import EncoderConfig
from serl_chunk.config.agents.flow import FlowConfig
from serl_chunk.config.agents.pi0 import Pi0Config
from serl_chunk.config.fields import acting, as_text, needs, require, setting, shaping

_BY_FLOW = needs("agent.policy", "flow", note="the layers of a Gaussian are agent.hidden")
TrainDelay = Literal["none", "recorded", "sampled"]
OF_PI0 = needs("agent.policy", "pi0")
_OF_PIXELS = ("kind", "features", "pooling", "latent", "share_cameras", "weights")  # as a critic sees them


@dataclasses.dataclass(frozen=True)
class PolicyConfig(AgentConfig):
    """Settings of every agent whose policy may be pi0."""

    policy: Literal["flow", "pi0"] = shaping("flow", "the kind of policy")
    flow: FlowConfig = setting(FlowConfig, "the flow policy", requires=_BY_FLOW)
    pi0: Pi0Config = setting(Pi0Config, "pi0", requires=OF_PI0)
    # docs/algorithms/delay.md; d is the window's own, or drawn from those below chunk.execute_steps.
    train_delay: TrainDelay = acting(
        "none",
        "train for late decisions: the first d actions of a chunk are given, the flow or pi0 learns the rest",
        requires=needs("agent.policy", "flow", "pi0"),
    )
    policy_ema: float = 0.999

    def _check(self) -> None:
        if self.as_pi0:
            self._check_pi0()

    def _check_pi0(self) -> None:
        # fmt: off
        pi0, most = self.pi0, len(self.pi0.cameras)
        require(len(self.image_keys) <= most, "agent.image_keys",
            f"must be at most {most} cameras, in the order of agent.pi0.cameras={','.join(pi0.cameras)}, got "
            f"{','.join(self.image_keys)}")
        for key, slot in zip(self.image_keys, pi0.cameras, strict=False):
            sides = [{"left", "right"}.intersection(re.split("[^a-z]+", name.lower())) for name in (key, slot)]
            require(not all(sides) or sides[0] == sides[1], "agent.pi0.cameras",
                f"{','.join(pi0.cameras)} reads {key} as {slot}. Name the cameras of the model that agent.image_keys="
                f"{','.join(self.image_keys)} are, such as base_0_rgb,right_wrist_0_rgb.")
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
        require(pi0.trainable != "none" or self.has_critic, "agent.pi0.trainable",
            f"none leaves {self.kind} nothing to train. Set full, expert, lora or lora_expert, or use acfql.")
        require(pi0.trainable != "full" or self.seen_by_critic != "features", "agent.critic_sees",
            "must not be features with agent.pi0.trainable=full, under which they change with every update. Set "
            "agent.pi0.trainable to expert or lora_expert, or agent.critic_sees to pixels or state.")
        require(self.use_state, "agent.use_state",
            "must be True with agent.policy=pi0, which reads the state. Leave it out.")
        of_pixels = _OF_PIXELS if self.seen_by_critic == "pixels" else ()
        read = ("frame_size", "shift", *(("state_latent", *of_pixels) if self.has_critic else ()))
        for name in (field.name for field in dataclasses.fields(EncoderConfig) if field.name not in read):
            value, usual = getattr(self.encoder, name), getattr(EncoderConfig(), name)
            require(value == usual, f"agent.encoder.{name}",
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
    def as_pi0(self) -> Pi0Config | None:
        return self.pi0 if self.policy == "pi0" else None

    @property
    def reads_bins(self) -> bool:
        return self.as_pi0 is not None and self.pi0.reads_bins

    def optimiser(self, network: Literal["policy", "critic"] = "policy") -> Optimiser:
        own = super().optimiser(network)
        of_pi0 = self.as_pi0 is not None and self.pi0.trainable != "none" and network == "policy"
        return self.pi0.schedule(own) if of_pi0 else own

    @property
    def trains_policy(self) -> bool:
        return self.as_pi0 is None or self.pi0.trainable != "none"

    @property
    def imitated_batches(self) -> bool:
        return self.as_pi0 is not None

    @property
    def policy_segments(self) -> tuple[int, int]:
        if self.seen_by_critic != "features":
            return 0, 0
        # Published ones show absent cameras too.
        cameras = len(self.pi0.cameras) if self.pi0.published and self.image_keys else len(self.image_keys)
        return cameras * self.pi0.feature_grid**2 + self.language.reads, self.pi0.vlm.width

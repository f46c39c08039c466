"""Agent configurations: frozen, validated, and free of JAX, so that a robot PC can read them cheaply.

`serl_chunk.agents.registry` maps each class to its implementation. A value's comment gives its source.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal, cast

from serl_chunk.config.critics import Activation, CriticConfig, SacCriticConfig
from serl_chunk.config.encoders import EMBEDDED, EncoderConfig
from serl_chunk.config.fields import Group, acting, as_text, needs, require, setting, shaping, widths
from serl_chunk.config.gripper import GripperConfig, SacGripperConfig
from serl_chunk.config.language import LanguageConfig
from serl_chunk.config.optimisers import Optimiser
from serl_chunk.config.pi0 import Pi0Config

JOINT_NOISE = 0.4  # of clones: docs/algorithms.md, "Moved joints"
DELAY_MAX = 2  # actions that `agent.flow.train_delay=sampled` gives at most

KernelInit = Literal["lecun_normal", "xavier_uniform"]


@dataclasses.dataclass(frozen=True)
class AgentConfig(Group, path="agent."):
    """Settings of every agent."""

    kind: ClassVar[str] = ""

    lr: float = setting(3e-4, "learning rate (Adam), of all that has no other", above=0)
    encoder_lr: float | None = setting(
        None, "of image, text and state encoders; none: their network's", above=0, requires=EMBEDDED
    )
    encoder: EncoderConfig = setting(EncoderConfig, "the image encoder")
    gripper: GripperConfig = setting(GripperConfig, "discrete or fixed grippers")
    language: LanguageConfig = setting(LanguageConfig, "the task's text as an input")
    image_keys: tuple[str, ...] = acting((), "cameras of the policy; empty: the state alone")
    use_state: bool = shaping(True, "the state vector is an input next to the images")
    policy_ema: float = setting(0.0, "decay of the averaged policy that acts; 0: the newest acts", least=0, below=1)
    bc_on: Literal["all", "demo", "demo+interventions", "+successes", "interventions"] = setting(
        "+successes", "steps that are imitated"
    )
    bc_joint_noise: float | None = setting(
        None,
        "deviation by which imitation sees joints moved, with targets that stay: it learns the way back; 1 is as far "
        "as the demonstrations command a joint to move in a tick; none: 0.4 for a flow without cameras, 0 for others",
        least=0,
        requires=needs("normaliser.actions", "relative"),
        off=0.0,
    )

    # Of agents whose class says no other.
    candidates = 1  # N of best-of-N at acting
    kernel_init = cast(KernelInit, "lecun_normal")
    acting_critic: ClassVar[Literal["online", "target"]] = "online"  # chooses among candidates
    bounded_critic: ClassVar[bool] = False  # Q is a sigmoid within the returns that the rewards allow
    earns_choice: ClassVar[bool] = False  # best of N has to earn its episodes (actor/arms.py)
    prefix_critic: ClassVar[bool] = False  # a second critic scores the executed actions (DecoupledConfig)

    @property
    def joint_noise(self) -> float:
        """What `bc_joint_noise` comes to."""
        if self.bc_joint_noise is None:
            return JOINT_NOISE if self.acts_by_flow and not self.image_keys else 0.0
        return self.bc_joint_noise

    @property
    def acts_by_flow(self) -> bool:
        """Whether the policy is a flow of ours."""
        return False

    def optimiser(self, network: Literal["policy", "critic"] = "policy") -> Optimiser:
        """Return what the optimiser of a network is built of."""
        return Optimiser(self.lr, self.lr if self.encoder_lr is None else self.encoder_lr)

    def _check(self) -> None:
        # fmt: off
        cameras, encoder = bool(self.image_keys), self.encoder
        require(cameras or not encoder.weights, "agent.encoder.weights",
            f"{encoder.weights} has no effect: agent.image_keys names no camera. Name cameras, or leave it out.")
        require(cameras or not encoder.cache_features, "agent.encoder.cache_features",
            "True has no effect: agent.image_keys names no camera. Name cameras, or set it to False.")
        require(cameras or self.use_state, "agent.use_state",
            "False leaves the agent without an input. Name cameras in agent.image_keys.")
        require(self.language.tokenizer != "sentencepiece" or getattr(self, "policy", "") == "pi0",
            "agent.language.tokenizer",
            "sentencepiece is for agent.policy=pi0: other agents embed each token, and need a vocabulary that is known "
            "without a file. Set it to bytes, or use bc with agent.policy=pi0.")

    @property
    def squashed(self) -> bool:
        """Return whether the policy's actions are a tanh, which cannot leave [-1, 1]."""
        return False


@dataclasses.dataclass(frozen=True)
class ActorCriticConfig(AgentConfig):
    """Settings of every agent with a critic."""

    critic_lr: float | None = setting(None, "of the critic; none: agent.lr", above=0)
    critic: CriticConfig = setting(CriticConfig, "the critic")
    candidates: int = acting(16, "N of best-of-N at acting; 1 takes the policy's first sample", least=1)

    def optimiser(self, network: Literal["policy", "critic"] = "policy") -> Optimiser:
        own, lr = super().optimiser(network), self.critic_lr
        if network == "policy" or lr is None:
            return own
        return own._replace(lr=lr, encoder_lr=lr if self.encoder_lr is None else self.encoder_lr)


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
    def squashed(self) -> bool:
        return True


@dataclasses.dataclass(frozen=True)
class FlowConfig(Group, path="agent.flow."):
    """A flow-matching policy: velocity net(o, x_t, t) + k(t) x_t, integrated from noise (FQL, Park 2025)."""

    hidden: tuple[int, ...] = widths((256, 256), "widths of the hidden layers")
    steps: int = acting(5, "steps of integration", least=1)
    # docs/algorithms.md, "The flow": below the deviation of chunks the candidates are too alike.
    spread: float = acting(
        0.2, "deviation s of chunks, in model space, that the field's linear part k(t) x is made for", above=0, most=2
    )
    # docs/algorithms/delay.md; d is the window's own, or drawn from 0 to DELAY_MAX.
    train_delay: Literal["none", "recorded", "sampled"] = acting(
        "none", "train for late decisions: the first d actions of a chunk are given, the flow learns the rest"
    )


@dataclasses.dataclass(frozen=True)
class AcfqlConfig(ActorCriticConfig):
    """Q-chunking with a flow policy (Li, Zhou and Levine 2025): the best of N of its chunks acts."""

    kind: ClassVar[str] = "acfql"
    acting_critic = "target"
    bounded_critic = True
    earns_choice = True

    flow: FlowConfig = setting(FlowConfig, "the flow policy")
    policy_ema: float = 0.999
    expectile: float = setting(0.8, "expectile of Q over the data, the V of the critic's target", least=0.5, below=1)
    policy_updates: int = setting(3, "flow updates after the last critic update: same batch, new noise", least=1)

    @property
    def acts_by_flow(self) -> bool:
        return True


@dataclasses.dataclass(frozen=True)
class DecoupledConfig(AcfqlConfig):
    """acfql whose policy is compared by a second critic, of the executed actions (Li, Park and Levine 2025).

    The first critic may score more actions than the policy outputs, `chunk.critic_horizon`, and teaches the second.
    """

    kind: ClassVar[str] = "decoupled"
    prefix_critic = True

    prefix_expectile: float = setting(
        0.8, "of the first critic's value over the data's futures; 0.5: the mean", least=0.5, below=1
    )
    prefix_lengths: int = acting(1, "lengths the second critic can score: equal parts of the executed actions", least=1)
    replan_spread: float | None = acting(None, "disagreement of heads that ends a chunk; none: never", least=0)

    def _check(self) -> None:
        # fmt: off
        if self.replan_spread is not None:
            require(self.prefix_lengths > 1, "agent.replan_spread",
                f"{self.replan_spread} compares lengths of a chunk, and agent.prefix_lengths is "
                f"{self.prefix_lengths}. Set that to 2 or more, or set it to none.")
            require(self.critic.ensemble > 1, "agent.replan_spread",
                f"{self.replan_spread} compares heads, and agent.critic.ensemble is 1. Raise that, or set it to none.")


_BY_FLOW = needs("agent.policy", "flow", note="the Gaussian's layers are agent.hidden")
_GAUSSIAN = needs("agent.policy", "gaussian", note="the flow's layers are agent.flow.hidden")
_PI0 = needs("agent.policy", "pi0")


@dataclasses.dataclass(frozen=True)
class BcConfig(AgentConfig):
    """Behaviour cloning, by flow matching or with a Gaussian; on demonstrations and interventions it is HG-DAgger."""

    kind: ClassVar[str] = "bc"

    bc_on: Literal["all", "demo", "demo+interventions", "+successes", "interventions"] = "demo+interventions"
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
        if self.policy == "pi0":
            self._check_pi0()
        require(self.encoder.trained_by != "critic", "agent.encoder.trained_by",
            "critic leaves bc's encoder untrained, for bc has no critic. Set it to each "
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
            "none leaves bc nothing to train. Set full, expert, lora or lora_expert.")
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
    def squashed(self) -> bool:
        return self.policy == "gaussian"

    def optimiser(self, network: Literal["policy", "critic"] = "policy") -> Optimiser:
        own = super().optimiser(network)
        return self.pi0.schedule(own) if self.policy == "pi0" else own

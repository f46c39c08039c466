"""Agent configurations: frozen, validated, and free of JAX, so that a robot PC can read them cheaply.

`serl_chunk.agents.registry` maps each class to its implementation. A value's comment gives its source.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Literal

from serl_chunk.config.critics import Activation, Aggregate, CriticConfig
from serl_chunk.config.encoders import EncoderConfig
from serl_chunk.config.gripper import GripperConfig
from serl_chunk.config.validation import require, require_choices, require_widths


@dataclasses.dataclass(frozen=True)
class ImproveConfig:
    """Chunks that the critic chose take a few gradient steps on it before they act (PA-RL, Mark et al. 2024)."""

    steps: int = 0  # gradient steps m; 0 switches it all off
    top: int = 4  # k: how many of the candidates climb, the best ones; all where there are fewer
    rate: float = 0.02  # length of a step in model space: what the action with the steepest slope moves by
    radius: float = 0.1  # how far any action may get from where it started, per dimension, in model space
    imitate: float = 0.0  # weight of imitating improved chunks beside the data (acfql, best-of-n); 0: they only act
    candidates: int = 8  # N that imitated chunks are chosen from, for imitate > 0

    def __post_init__(self) -> None:
        for name, least in (("steps", 0), ("top", 1), ("candidates", 1)):
            value = getattr(self, name)
            require(value >= least, f"agent.improve.{name} must be at least {least}, got {value}")
        require(0 < self.rate < math.inf, f"agent.improve.rate must be positive and finite, got {self.rate}")
        require(
            0 < self.radius <= 2,
            f"agent.improve.radius must be in (0, 2], got {self.radius}: model space reaches from -1 to 1",
        )
        require(
            0 <= self.imitate < math.inf,
            f"agent.improve.imitate must be >= 0 (0 switches it off) and finite, got {self.imitate}",
        )
        require(
            self.imitate == 0 or self.steps > 0,
            "agent.improve.imitate would imitate chunks that nothing improved: set agent.improve.steps, or imitate=0",
        )


def _check_together(order: str, policy_updates: int) -> None:
    require(
        order != "joint" or policy_updates == 1,
        f"agent.policy_updates must be 1 with agent.update_order=joint, got {policy_updates}: there the policy "
        "takes one step beside each of the critic's",
    )


@dataclasses.dataclass(frozen=True)
class AgentConfig:
    """What every agent has."""

    kind: ClassVar[str] = ""

    lr: float = 3e-4  # Adam, for each of the agent's optimisers
    grad_clip: float = 0.0  # global norm; 0 switches clipping off
    weight_decay: float = 0.0  # AdamW's, of every trained network (the temperature is none); 0 is Adam
    # Of the layers of policies and critics; xavier is RLPD's and FQL's. Image encoders keep lecun_normal.
    kernel_init: Literal["lecun_normal", "xavier_uniform"] = "lecun_normal"
    critic: CriticConfig = dataclasses.field(default_factory=CriticConfig)
    encoder: EncoderConfig = dataclasses.field(default_factory=EncoderConfig)
    gripper: GripperConfig = dataclasses.field(default_factory=GripperConfig)  # discrete or fixed grippers
    image_keys: tuple[str, ...] = ()  # cameras the agent looks at; () trains on the state alone
    use_state: bool = True  # whether the state vector is an input beside the images
    candidates: int = 16  # N of best-of-N at acting; 1 takes the policy's first sample
    pretrain_candidates: int = 1  # N while the critic has seen no failure: a critic trained on successes misleads
    policy_ema: float = 0.0  # decay per policy update of the averaged policy that acts; 0 acts with the newest
    acting_critic: Literal["online", "target"] = "online"  # the critic that chooses among candidates at acting
    choose_by: Aggregate = "mean"  # over the heads, where candidates are compared
    choose_std: float = 0.0  # deviations over the heads subtracted from that mean: what heads disagree on is avoided
    # An exploring decision's noise is drawn at so many knots over the chunk and interpolated, so that exploration is
    # smooth within a chunk; 0: every step has noise of its own.
    exploration_knots: int = 0
    # A second critic scores the executed actions alone, and is what policies, candidates and targets look at; the
    # first may then score more of them, chunk.critic_horizon (decoupled Q-chunking, Li, Park and Levine 2025).
    prefix_critic: bool = False
    prefix_expectile: float = 0.8  # of the first critic's value over how the data go on; 0.5: the mean
    # How many lengths the prefix critic can score, equally spaced up to the executed actions; 1: these alone.
    prefix_lengths: int = 1
    # A decision asks to be followed where its heads disagree by more than this, in units of the return, on what the
    # actions behind its first length add; none: never. actor.adaptive_execution obeys.
    replan_spread: float | None = None
    # U critic steps, then the policy's against the new critic (RLPD); or both at once on every batch, each from the
    # parameters before the step (Q-chunking's code).
    update_order: Literal["critic_first", "joint"] = "critic_first"
    # Imitation losses are divided by their weights' sum, or by the number of steps in the batch whatever their weight
    # (Q-chunking's code: the more of a batch lies beyond ends, the weaker the loss).
    bc_mean: Literal["weights", "batch"] = "weights"
    bc_on: Literal["all", "demo", "demo+interventions", "+successes", "interventions"] = "+successes"

    def __post_init__(self) -> None:
        require_choices(self, "agent.")
        require(
            not self.encoder.weights or bool(self.image_keys),
            f"agent.encoder.weights={self.encoder.weights} would not be read: agent.image_keys names no camera",
        )
        require(
            not self.encoder.cache_features or bool(self.image_keys),
            "agent.encoder.cache_features=True would keep nothing: agent.image_keys names no camera. Name cameras, or "
            "set agent.encoder.cache_features=False",
        )
        require(0 <= self.policy_ema < 1, f"agent.policy_ema must be in [0, 1), got {self.policy_ema}")
        require(0 < self.lr < math.inf, f"agent.lr must be positive and finite, got {self.lr}")
        require(
            0 <= self.weight_decay < math.inf,
            f"agent.weight_decay must be >= 0 (0 is Adam) and finite, got {self.weight_decay}",
        )
        require(
            0 <= self.grad_clip < math.inf,
            f"agent.grad_clip must be >= 0 (0 switches it off) and finite, got {self.grad_clip}",
        )
        require(self.candidates >= 1, f"agent.candidates must be at least 1, got {self.candidates}")
        require(
            self.pretrain_candidates >= 1,
            f"agent.pretrain_candidates must be at least 1, got {self.pretrain_candidates}",
        )
        require(0 <= self.choose_std < math.inf, f"agent.choose_std must be >= 0, got {self.choose_std}")
        require(
            self.choose_std == 0 or self.choose_by == "mean",
            f"agent.choose_std={self.choose_std:g} is subtracted from a mean over heads: set agent.choose_by=mean, or "
            "agent.choose_std=0",
        )
        require(
            self.choose_std == 0 or self.critic.ensemble > 1,
            f"agent.choose_std={self.choose_std:g} needs heads that may disagree: set agent.critic.ensemble to 2 or "
            "more, or agent.choose_std=0",
        )
        require(
            self.exploration_knots >= 0,
            f"agent.exploration_knots must be >= 0 (0: independent noise), got {self.exploration_knots}",
        )
        require(
            0.5 <= self.prefix_expectile < 1,
            f"agent.prefix_expectile must be in [0.5, 1) (0.5 is the mean), got {self.prefix_expectile}",
        )
        require(self.prefix_lengths >= 1, f"agent.prefix_lengths must be at least 1, got {self.prefix_lengths}")
        require(
            self.prefix_lengths == 1 or self.prefix_critic,
            f"agent.prefix_lengths={self.prefix_lengths} needs agent.prefix_critic=True: there is no other critic of "
            "several lengths",
        )
        require(
            self.replan_spread is None or self.prefix_lengths > 1,
            f"agent.replan_spread={self.replan_spread} compares lengths of a chunk, and agent.prefix_lengths is "
            f"{self.prefix_lengths}: set it to 2 or more (with agent.prefix_critic=True), or agent.replan_spread=none",
        )
        require(
            self.replan_spread is None or self.replan_spread >= 0,
            f"agent.replan_spread must be >= 0 (units of the return) or none, got {self.replan_spread}",
        )
        require(
            self.replan_spread is None or self.critic.ensemble > 1,
            "agent.replan_spread is about how far heads disagree, and agent.critic.ensemble is 1: raise it",
        )
        require(
            self.use_state or bool(self.image_keys),
            "agent.use_state=False leaves the agent blind: name cameras in agent.image_keys",
        )


@dataclasses.dataclass(frozen=True)
class AcrlpdConfig(AgentConfig):
    """SAC/RLPD on flattened chunks (RLPD, Ball et al. 2023). Horizon 1 is plain RLPD."""

    kind: ClassVar[str] = "acrlpd"

    candidates: int = 1  # RLPD's; the policy's loss and temperature are those of one sample
    hidden: tuple[int, ...] = (256, 256)  # policy
    bc_alpha: float = 0.01  # weight of -log pi(demonstrated chunk), per dimension (QC-RLPD)
    init_temperature: float = 0.01
    target_entropy_per_dim: float = -0.5  # of one of the H*A dimensions
    backup_entropy: bool = False  # RLPD's published target adds entropy; it drowns Q <= 1 as H grows
    policy_layer_norm: bool = True  # in the policy's network; False is Q-chunking's
    log_prob: Literal["mean", "sum"] = "mean"  # over the H*A dimensions; sum is the published convention
    log_std_min: float = -10.0  # of the policy's Gaussian before tanh; -20 is Q-chunking's
    bc_clip: float = 1e-6  # imitated actions are moved to within 1 - bc_clip, where atanh is finite; Q-chunking's: 1e-5
    target_candidates: int = 1  # policy samples in the target, of which the online critic chooses; 1 is RLPD's
    improve: ImproveConfig = dataclasses.field(default_factory=ImproveConfig)  # chosen chunks climb the critic
    bc_invalid: bool = False  # imitate every row, also beyond an episode's end and against `bc_on` (Q-chunking's code)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_widths("agent.hidden", self.hidden)
        require(
            self.critic.target_floor == "none" or not self.backup_entropy,
            "agent.critic.target_floor=mc compares the target with rewards alone, and agent.backup_entropy adds "
            "entropy to it: switch one of them off",
        )
        require(
            self.target_candidates >= 1, f"agent.target_candidates must be at least 1, got {self.target_candidates}"
        )
        require(
            self.target_candidates == 1 or not self.backup_entropy,
            f"agent.target_candidates={self.target_candidates} needs agent.backup_entropy=false: the best of several "
            "samples has another entropy than the policy",
        )
        require(
            self.improve.imitate == 0,
            "agent.improve.imitate must be 0 for acrlpd: its policy climbs the critic by its own gradient",
        )
        require(self.bc_alpha >= 0, f"agent.bc_alpha must be >= 0, got {self.bc_alpha}")
        require(self.log_std_min < 2, f"agent.log_std_min must be below 2, got {self.log_std_min}")
        require(0 < self.bc_clip < 0.1, f"agent.bc_clip must be in (0, 0.1), got {self.bc_clip}")
        require(self.init_temperature > 0, f"agent.init_temperature must be positive, got {self.init_temperature}")


@dataclasses.dataclass(frozen=True)
class FlowConfig:
    """A flow-matching policy: velocity v(o, x_t, t), Euler-integrated from noise (FQL, Park 2025)."""

    hidden: tuple[int, ...] = (256, 256)
    steps: int = 5  # Euler steps
    activation: Activation = "relu"  # gelu is FQL's
    layer_norm: bool = False  # after each activation, as FQL's option has it
    # How t enters: (t, cos pi t, sin pi t); t alone, as published; or `fourier_dim` fixed sines and cosines of it.
    time: Literal["cosine", "raw", "fourier"] = "cosine"
    fourier_dim: int = 64  # for time=fourier
    # Training for decisions that arrive after a delay (docs/algorithms/delay.md): the first d actions of a chunk are
    # given, and the flow learns the rest. d is the window's own, or drawn from 0..train_delay_max.
    train_delay: Literal["none", "recorded", "sampled"] = "none"
    train_delay_max: int = 2  # ticks, for train_delay=sampled
    noise_low: float = 0.0  # scale of the first candidate's starting noise; the last one's is 1 (as published: all 1)

    def __post_init__(self) -> None:
        require_choices(self, "agent.flow.")
        require_widths("agent.flow.hidden", self.hidden)
        require(0 <= self.noise_low <= 1, f"agent.flow.noise_low must be in [0, 1], got {self.noise_low}")
        require(
            self.fourier_dim >= 4 and self.fourier_dim % 2 == 0,
            f"agent.flow.fourier_dim must be an even number of at least 4, got {self.fourier_dim}",
        )
        require(self.train_delay_max >= 1, f"agent.flow.train_delay_max must be at least 1, got {self.train_delay_max}")
        require(self.steps >= 1, f"agent.flow.steps must be at least 1, got {self.steps}")


def _check_noise(knots: int, candidates: int, flow: FlowConfig) -> None:
    require(
        knots == 0 or candidates > 1 or flow.noise_low > 0,
        f"agent.exploration_knots={knots} would smooth noise that there is none of: the one candidate starts from "
        "agent.flow.noise_low=0. Set agent.flow.noise_low above 0, or agent.exploration_knots=0",
    )


@dataclasses.dataclass(frozen=True)
class AcfqlConfig(AgentConfig):
    """Q-chunking with a flow policy (Li, Zhou and Levine 2025): best-of-N (QC), or distilled to one step (QC-FQL)."""

    kind: ClassVar[str] = "acfql"

    critic: CriticConfig = dataclasses.field(
        default_factory=lambda: CriticConfig(
            ensemble=4, target_subset=4, target_aggregate="mean", loss="bounded", tau=0.01
        )
    )
    flow: FlowConfig = dataclasses.field(default_factory=FlowConfig)
    policy_ema: float = 0.999
    acting_critic: Literal["online", "target"] = "target"
    target: Literal["policy", "expectile"] = "expectile"  # V by expectile regression, or Q of best-of-N policy samples
    expectile: float = 0.8
    target_candidates: int = 8  # N in the target, for target="policy" and actor_type="best-of-n"
    target_flow_steps: int | None = None  # Euler steps of those N; none: flow.steps
    # What acts: the best of N flow samples by the critic, or a one-step policy that is distilled from the flow and
    # climbs the critic (FQL, Park 2025). A chunk of one step without return_steps is BFN, and FQL.
    actor_type: Literal["best-of-n", "distill-ddpg"] = "best-of-n"
    alpha: float = 100.0  # weight of the distillation, for actor_type="distill-ddpg"
    normalise_q: bool = False  # divide the one-step policy's Q term by the batch's mean |Q| (FQL's option)
    improve: ImproveConfig = dataclasses.field(default_factory=ImproveConfig)  # chosen chunks climb the critic
    policy_updates: int = 3  # flow updates after the last critic update, same batch, fresh noise

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_noise(self.exploration_knots, self.candidates, self.flow)
        require(0.5 <= self.expectile < 1, f"agent.expectile must be in [0.5, 1), got {self.expectile}")
        require(
            self.target_candidates >= 1, f"agent.target_candidates must be at least 1, got {self.target_candidates}"
        )
        require(
            self.target_flow_steps is None or self.target_flow_steps >= 1,
            f"agent.target_flow_steps must be at least 1, or none for agent.flow.steps, got {self.target_flow_steps}",
        )
        require(self.policy_updates >= 1, f"agent.policy_updates must be at least 1, got {self.policy_updates}")
        _check_together(self.update_order, self.policy_updates)
        require(
            self.actor_type == "best-of-n" or self.improve.imitate == 0,
            "agent.improve.imitate needs agent.actor_type=best-of-n: a distilled policy climbs the critic already",
        )
        require(
            self.actor_type == "best-of-n" or self.flow.train_delay == "none",
            f"agent.flow.train_delay={self.flow.train_delay} needs agent.actor_type=best-of-n: a distilled policy has "
            "no input for committed actions",
        )
        require(self.alpha >= 0, f"agent.alpha must be >= 0, got {self.alpha}")


@dataclasses.dataclass(frozen=True)
class BcConfig(AgentConfig):
    """Behaviour cloning, by flow matching or with a Gaussian; on demonstrations and interventions it is HG-DAgger."""

    kind: ClassVar[str] = "bc"

    candidates: int = 1
    bc_on: Literal["all", "demo", "demo+interventions", "+successes", "interventions"] = "demo+interventions"
    policy: Literal["flow", "gaussian"] = "flow"
    flow: FlowConfig = dataclasses.field(default_factory=FlowConfig)
    hidden: tuple[int, ...] = (256, 256)  # of the Gaussian policy (TanhNormal)
    policy_ema: float = 0.999
    policy_updates: int = 3  # policy updates per update, same batch, fresh noise; as acfql's

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.policy_updates >= 1, f"agent.policy_updates must be at least 1, got {self.policy_updates}")
        _check_together(self.update_order, self.policy_updates)
        require_widths("agent.hidden", self.hidden)
        if self.policy == "flow":
            _check_noise(self.exploration_knots, self.candidates, self.flow)
        require(
            self.policy == "flow" or self.flow.train_delay == "none",
            f"agent.flow.train_delay={self.flow.train_delay} needs agent.policy=flow: the Gaussian has no input for "
            "committed actions",
        )
        require(
            not self.prefix_critic,
            "agent.prefix_critic must be False for bc: it has no critic to learn a prefix's value from; use acfql or "
            "acrlpd",
        )
        for name, nothing in (("loss", "squared"), ("target_floor", "none")):
            value = getattr(self.critic, name)
            require(
                value == nothing,
                f"agent.critic.{name}={value} would change nothing: bc has no critic. Leave it out, or use an agent "
                "with one (acfql, acrlpd)",
            )
        require(self.candidates == 1, "agent.candidates must be 1 for bc: it has no critic to choose by")
        require(self.choose_std == 0, "agent.choose_std must be 0 for bc: it has no critic to choose by")
        require(
            self.encoder.trained_by != "critic",
            "agent.encoder.trained_by=critic leaves bc's encoder untrained, for bc has no critic: set "
            "agent.encoder.trained_by=each (agent.encoder.frozen_backbone keeps pretrained convolutions as they are)",
        )

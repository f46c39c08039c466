"""Settings of every agent, and of every one with a critic. A value's comment gives its source."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, cast

from serl_chunk.config.agents.critic import CriticConfig
from serl_chunk.config.agents.encoder import EMBEDDED, EncoderConfig
from serl_chunk.config.agents.gripper import GripperConfig
from serl_chunk.config.agents.language import LanguageConfig
from serl_chunk.config.fields import (
    NOT_CONSTANT,
    TRAINED,
    Group,
    acting,
    needs,
    not_by,
    require,
    setting,
    shaping,
)

if TYPE_CHECKING:
    from serl_chunk.config.agents.pi0 import Pi0Config

JOINT_NOISE = 0.4  # of clones: docs/algorithms.md, "Moved joints"
BcOn = Literal["all", "demo", "demo+interventions", "+successes", "interventions"]
CriticSees = Literal["features", "pixels", "state"]
KernelInit = Literal["lecun_normal", "xavier_uniform"]


class Optimiser(NamedTuple):
    """Adam with decoupled weight decay (AdamW) of one network and of the encoders in it."""

    lr: float
    encoder_lr: float
    lr_warmup: int = 0  # gradient steps in which the rate rises to `lr`
    lr_cosine: int = 0  # gradient steps after which it has fallen to a tenth; 0: it stays
    weight_decay: float = 0.0
    grad_clip: float = 0.0  # norm of the network's gradient, encoders included; 0: any
    b2: float = 0.999  # decay of the average of squared gradients


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
    policy_ema: float = setting(
        0.0, "decay of the averaged policy that acts; 0: the newest acts", least=0, below=1, requires=TRAINED, off=0.0
    )
    bc_on: BcOn | None = setting(
        None,
        "steps that are imitated; +successes: also the policy's own of successful episodes, at a fifth of the weight; "
        "none: +successes where a human intervenes, demo+interventions elsewhere",
        requires=(TRAINED, not_by("edit", "dsrl")),
        off=None,
    )
    bc_joint_noise: float | None = setting(
        None,
        "deviation by which imitation sees joints moved, with targets that stay: it learns the way back; 1 is as far "
        "as the demonstrations command a joint to move in a tick; none: 0.4 for a flow without cameras, 0 for others",
        least=0,
        requires=(needs("normaliser.actions", "relative"), NOT_CONSTANT),
        off=0.0,
    )

    # Of agents whose class says no other.
    candidates = 1  # N of best-of-N at acting
    kernel_init = cast(KernelInit, "lecun_normal")
    acting_critic: ClassVar[Literal["online", "target"]] = "online"  # chooses among candidates
    bounded_critic: ClassVar[bool] = False  # Q is a sigmoid within the returns that the rewards allow
    has_critic: ClassVar[bool] = False
    iterates: ClassVar[bool] = False  # trains in iterations on groups of episodes, each under one version
    clones_successes = False  # the replay keeps the successes of all iterations, to train on
    own_weight = 0.2  # in imitation, of the policy's own successes: docs/algorithms/going_online.md
    imitates_all_rows: ClassVar[bool] = False  # of every actor and outcome
    own_policy_batch: ClassVar[bool] = True  # the policy may have another batch than the critic
    learns_to_choose: ClassVar[bool] = False  # a critic that saw no failure does not choose among candidates
    prefix_critic: ClassVar[bool] = False  # a second critic scores the executed actions (DecoupledConfig)
    prefix_lengths = 1  # that it can score
    replan_spread = cast(float | None, None)

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

    @property
    def as_pi0(self) -> Pi0Config | None:
        """The pi0 that this is."""
        return None

    @property
    def improvement(self) -> str:
        """How pi0 gets better (`AcfqlConfig.improve_by`); "none" of what is no pi0."""
        return "none"

    @property
    def trains_policy(self) -> bool:
        """Whether any parameter of the policy is trained."""
        return True

    @property
    def imitated_batches(self) -> bool:
        """Whether the policy's batches hold imitated windows alone, because its rows are dear."""
        return False

    @property
    def relabels(self) -> bool:
        """Whether the policy imitates the best of its own candidates at replayed observations."""
        return False

    @property
    def seen_by_critic(self) -> CriticSees:
        """What a critic sees beside the state."""
        return "pixels"

    @property
    def policy_segments(self) -> tuple[int, int]:
        """The number and width of the features by which the policy shows an observation to the critic; none: 0."""
        return 0, 0

    @property
    def as_published(self) -> dict[str, Any]:
        """Its sizes and weights by the names of PublishedQcConfig. Raises ConfigError: Q-chunking has no such agent."""
        return {}

    @property
    def reads_bins(self) -> bool:
        """Whether a prompt holds the state, in bins."""
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
        require(self.language.tokenizer != "sentencepiece" or self.as_pi0 is not None,
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

    has_critic = True

    critic_lr: float | None = setting(None, "of the critic; none: agent.lr", above=0)
    critic: CriticConfig = setting(CriticConfig, "the critic")
    candidates: int = acting(
        16, "N of best-of-N at acting; 1 takes the policy's first sample", least=1, requires=not_by("rlt", "dsrl")
    )

    @property
    def as_published(self) -> dict[str, Any]:
        critic = self.critic
        return {"num_qs": critic.ensemble, "q_agg": critic.target_aggregate, "value_hidden_dims": critic.hidden}

    def optimiser(self, network: Literal["policy", "critic"] = "policy") -> Optimiser:
        own, lr = super().optimiser(network), self.critic_lr
        if network == "policy" or lr is None:
            return own
        return own._replace(lr=lr, encoder_lr=lr if self.encoder_lr is None else self.encoder_lr)

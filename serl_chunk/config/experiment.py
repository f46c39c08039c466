"""An experiment: one tree of frozen dataclasses, validated where it is built, and here across its parts.

An experiment's file finds all parts but the agent's and the robot's in this module. Rates are per tick, times in
seconds, sizes in steps unless a name says otherwise.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from serl_chunk.config.agents import AcfqlConfig, AcrlpdConfig, AgentConfig, BcConfig
from serl_chunk.config.learner import LearnerConfig
from serl_chunk.config.replay import ReplayConfig
from serl_chunk.config.robots import RobotConfig
from serl_chunk.config.transport import TransportConfig
from serl_chunk.config.validation import require, require_choices


@dataclasses.dataclass(frozen=True)
class ChunkConfig:
    """Lengths in ticks. Default: all equal `horizon`. What an agent makes of them is checked by the experiment."""

    horizon: int = 5  # actions the policy outputs
    critic_horizon: int | None = None  # actions the critic scores; agent.prefix_critic: more than execute_steps
    execute_steps: int | None = None  # a chunk is followed by the next one at this index (delay included)
    return_steps: int | None = None  # rewards in the critic's target before it bootstraps; n-step returns where larger

    def __post_init__(self) -> None:
        require(self.horizon >= 1, f"chunk.horizon must be at least 1, got {self.horizon}")
        require(self.critic_steps >= 1, f"chunk.critic_horizon must be at least 1, got {self.critic_horizon}")
        require(
            1 <= self.executed <= self.horizon,
            f"chunk.execute_steps must be 1..{self.horizon} (horizon), got {self.execute_steps}",
        )
        require(
            self.returned >= self.critic_steps,
            f"chunk.return_steps={self.return_steps} is below chunk.critic_horizon={self.critic_steps}: the target "
            "would bootstrap in the middle of the actions the critic scores. Set it to at least critic_horizon, or "
            "leave it out.",
        )

    def check_scored(self, *, prefix_critic: bool) -> None:
        """Whether the actions a critic scores are those that are executed; raises ConfigError where not.

        A critic of more actions than are executed needs a second one, of those (`prefix_critic`), and that one a
        longer critic to learn from.
        """
        if prefix_critic:
            require(
                self.critic_steps > self.executed,
                f"agent.prefix_critic=True learns the value of the {self.executed} executed actions "
                f"(chunk.execute_steps) from a critic of more, and chunk.critic_horizon is {self.critic_steps}: raise "
                "chunk.critic_horizon, lower chunk.execute_steps, or set agent.prefix_critic=False",
            )
            return
        require(
            self.critic_steps <= self.horizon,
            f"chunk.critic_horizon must be 1..{self.horizon} (horizon), got {self.critic_horizon}: the policy outputs "
            "no more actions than that, and could not be scored. Lower it, or set agent.prefix_critic=True (acfql, "
            "acrlpd), which scores the executed ones",
        )
        require(
            self.executed >= self.critic_steps,
            f"chunk.execute_steps={self.executed} is below chunk.critic_horizon={self.critic_steps}: the critic would "
            "score actions that are never executed, so nothing ever corrects the tail's value. Lower critic_horizon to "
            "execute_steps, execute the whole chunk, or set agent.prefix_critic=True (acfql, acrlpd)",
        )

    @property
    def carried(self) -> int:
        """Actions of a training window: as many as the policy outputs, or the critic scores where that is more."""
        return max(self.horizon, self.critic_steps)

    @property
    def critic_steps(self) -> int:
        """`critic_horizon`, or `horizon` where it is not given."""
        return self.horizon if self.critic_horizon is None else self.critic_horizon

    @property
    def executed(self) -> int:
        """`execute_steps`, or `horizon` where it is not given."""
        return self.horizon if self.execute_steps is None else self.execute_steps

    @property
    def returned(self) -> int:
        """`return_steps`, or `critic_steps` where it is not given."""
        return self.critic_steps if self.return_steps is None else self.return_steps


@dataclasses.dataclass(frozen=True)
class NormaliserConfig:
    """How observations and chunks enter model space (docs/architecture.md, section 3)."""

    actions: Literal["absolute_range", "absolute_demo", "relative", "norm_stats"] = "relative"
    state: bool = True  # mean/std of the demonstrations; False leaves states as they are
    norm_stats: str = ""  # a norm_stats.json instead of the demonstrations; read by the learner
    state_std_floor: float = 0.01
    action_scale_floor: float = 0.02  # in robot units; keeps a dimension the demonstrations never move from exploding
    demo_range: float = 0.9  # where the demonstrations' extremes land, so that a tanh policy can express them

    def __post_init__(self) -> None:
        require_choices(self, "normaliser.")
        require(
            bool(self.norm_stats) or self.actions != "norm_stats",
            "normaliser.actions=norm_stats needs normaliser.norm_stats: the file that `serl-chunk data stats` writes",
        )
        require(
            not self.norm_stats or self.state or self.actions == "norm_stats",
            "normaliser.norm_stats would not be read: set normaliser.state, or normaliser.actions=norm_stats",
        )
        require(0 < self.demo_range <= 1, f"normaliser.demo_range must be in (0, 1], got {self.demo_range}")
        require(self.state_std_floor > 0, f"normaliser.state_std_floor must be positive, got {self.state_std_floor}")
        require(
            self.action_scale_floor > 0,
            f"normaliser.action_scale_floor must be positive, got {self.action_scale_floor}",
        )


def infinite_horizon_return(reward: float, discount: float) -> float:
    """The discounted sum of `reward` on every tick from now on."""
    return reward / (1 - discount)


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    """The one place where rewards are changed; applies to online data and demonstrations alike."""

    scale: float = 1.0
    offset: float = 0.0  # added to every step's scaled reward
    failure_reward: float = 0.0  # reward of the step on which a declared failure ends the episode
    intervention_penalty: float = 0.0  # subtracted from the effective reward of the last step before an intervention

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            require(math.isfinite(value), f"reward.{field.name} must be a finite number, got {value}")
        require(
            self.intervention_penalty >= 0,
            f"reward.intervention_penalty must be >= 0 (it is subtracted), got {self.intervention_penalty}",
        )


def possible_returns(reward: RewardConfig, discount: float) -> tuple[float, float]:
    """The least and the greatest discounted return from any step on, for recorded rewards of 0, and 1 at a success.

    k steps of the offset c and an end e return c (1 - gamma^k) / (1 - gamma) + gamma^k e, which lies between e and
    c / (1 - gamma); e is a success, a declared failure, or none (a truncated episode counts as going on for ever).
    One intervention costs its penalty; an episode with several may return less, which a critic of a range cannot show.
    """
    ends = infinite_horizon_return(reward.offset, discount), reward.scale + reward.offset, reward.failure_reward
    return min(ends) - reward.intervention_penalty, max(ends)


@dataclasses.dataclass(frozen=True)
class ActorConfig:
    """The control loop (docs/architecture.md, section 7)."""

    clock: Literal["lockstep", "realtime"] = "lockstep"
    delay_ticks: int = 0  # lockstep: ticks between a decision's observation and its chunk
    inference: Literal["auto", "sync", "async"] = "auto"  # realtime; auto: sync if inference p99 < half a tick
    # Plan anew after the steps that a decision asks for (agent.replan_spread), instead of after execute_steps always.
    adaptive_execution: bool = False
    # When cameras are recorded: on every tick, or at decisions, at the ends of windows that begin there, and by humans.
    # auto: every tick where frames come with the observation (gym environments), else decisions.
    frames: Literal["auto", "every_tick", "decisions"] = "auto"
    intervention: str = "none"  # none | scripted | path of a recorded intervention file
    max_human_ticks: int = 0  # the intervention source stops after so many ticks of a run; 0: no limit
    max_episodes: int = 0  # 0: until the learner is done

    def __post_init__(self) -> None:
        require_choices(self, "actor.")
        for name in ("delay_ticks", "max_human_ticks", "max_episodes"):
            require(getattr(self, name) >= 0, f"actor.{name} must be >= 0, got {getattr(self, name)}")
        require(
            self.clock == "lockstep" or self.delay_ticks == 0,
            "actor.delay_ticks belongs to clock=lockstep; in real time the delay is measured, not set",
        )


__all__ = [
    "ActorConfig",
    "ChunkConfig",
    "ExperimentConfig",
    "LearnerConfig",
    "NormaliserConfig",
    "ReplayConfig",
    "RewardConfig",
    "TransportConfig",
]


@dataclasses.dataclass(frozen=True)
class ExperimentConfig:
    """Everything about one experiment."""

    name: str
    robot: RobotConfig
    agent: AgentConfig = dataclasses.field(default_factory=AcfqlConfig)
    chunk: ChunkConfig = dataclasses.field(default_factory=ChunkConfig)
    normaliser: NormaliserConfig = dataclasses.field(default_factory=NormaliserConfig)
    reward: RewardConfig = dataclasses.field(default_factory=RewardConfig)
    replay: ReplayConfig = dataclasses.field(default_factory=ReplayConfig)
    learner: LearnerConfig = dataclasses.field(default_factory=LearnerConfig)
    actor: ActorConfig = dataclasses.field(default_factory=ActorConfig)
    transport: TransportConfig = dataclasses.field(default_factory=TransportConfig)
    discount: float = 0.985  # gamma per tick; choose gamma**T near 0.2 at the time limit T
    seed: int = 42
    preset: str = ""  # for the record: what --preset and --compat made of it
    compat: str = ""

    def __post_init__(self) -> None:
        require(0 < self.discount < 1, f"discount must be in (0, 1), got {self.discount}")
        require(0 <= self.seed < 2**31 - 1, f"seed must be in 0 .. {2**31 - 2}, got {self.seed}")
        step_reward = self.reward.offset
        if step_reward < 0:
            worst = infinite_horizon_return(step_reward, self.discount)
            named = math.floor(worst * 1e4) / 1e4  # the value in the message, once set, is within the bound
            require(
                self.reward.failure_reward <= worst,
                f"reward.offset={step_reward} makes every step cost something, so failing early would pay: "
                f"set reward.failure_reward to at most offset/(1-discount)={named:.12g} "
                f"(it is {self.reward.failure_reward})",
            )
        require(
            self.reward.intervention_penalty == 0 or not isinstance(self.agent, BcConfig),
            f"reward.intervention_penalty={self.reward.intervention_penalty:g} would change nothing: bc learns from no "
            "reward. Set it to 0, or use an agent with a critic (acfql, acrlpd)",
        )
        loop = self.learner
        require(
            not isinstance(self.agent, BcConfig)
            or loop.online_steps != 0
            or loop.offline_steps + loop.pretrain_steps > 0,
            "learner.online_steps=0 trains on demonstrations alone, and learner.critic_pretrain_steps="
            f"{loop.critic_pretrain_steps} trains nothing of bc, which has no critic: set learner.pretrain_steps or "
            "learner.offline_steps",
        )
        if self.agent.critic.loss != "squared":
            self._check_value_range()
        require(
            self.agent.critic.target_floor == "none" or self.replay.windows == "episode",
            "agent.critic.target_floor=mc needs the return to an episode's end, and windows of replay.windows=qc "
            "belong to no episode: set replay.windows=episode, or agent.critic.target_floor=none",
        )
        r, of_humans = self.replay, self.agent.bc_on in ("interventions", "demo+interventions")
        require(
            r.windows == "episode" or r.demo_fraction != 1 or not of_humans or self.learner.online_steps == 0,
            f"agent.bc_on={self.agent.bc_on} imitates human steps online, and replay.windows=qc with "
            "replay.demo_fraction=1 draws demonstrations alone: set replay.windows=episode, or agent.bc_on=demo",
        )
        self._check_shared_encoder()
        self.chunk.check_scored(prefix_critic=self.agent.prefix_critic)
        require(
            self.chunk.executed % self.agent.prefix_lengths == 0,
            f"agent.prefix_lengths={self.agent.prefix_lengths} must divide chunk.execute_steps={self.chunk.executed}, "
            "of which they are equal parts",
        )
        require(
            not self.actor.adaptive_execution or self.agent.replan_spread is not None,
            "actor.adaptive_execution=True plans anew where a decision asks for it, and none does while "
            "agent.replan_spread is none: set it, with agent.prefix_critic=True and agent.prefix_lengths of 2 or more",
        )
        require(
            self.agent.critic.tail == "repeat" or self.chunk.critic_steps <= self.chunk.horizon,
            f"agent.critic.tail=policy fills chunk.critic_horizon={self.chunk.critic_steps} actions from the policy's "
            f"{self.chunk.horizon} (chunk.horizon), which are fewer: use agent.critic.tail=repeat",
        )
        if self.agent.gripper.composition == "learned":
            self._check_learned_gripper()
        require(
            self.actor.delay_ticks < self.chunk.executed,
            f"actor.delay_ticks={self.actor.delay_ticks} must be below chunk.execute_steps={self.chunk.executed}: a "
            "chunk that arrives after it should have been executed leaves the robot holding",
        )
        require(
            self.agent.exploration_knots <= self.chunk.horizon,
            f"agent.exploration_knots={self.agent.exploration_knots} is above chunk.horizon={self.chunk.horizon}: a "
            "chunk has no place for more knots than steps; 0 gives every step noise of its own",
        )
        if isinstance(self.agent, AcfqlConfig | BcConfig) and self.agent.flow.train_delay == "sampled":
            longest = self.agent.flow.train_delay_max
            require(
                longest < self.chunk.horizon,
                f"agent.flow.train_delay_max={longest} must be below chunk.horizon={self.chunk.horizon}: nothing of "
                "the chunk would be left to learn",
            )
            require(
                self.actor.delay_ticks <= longest,
                f"actor.delay_ticks={self.actor.delay_ticks} is above agent.flow.train_delay_max={longest}: the policy "
                "would act with more committed actions than it ever trained with",
            )

    @property
    def frames_every_tick(self) -> bool:
        """Whether the actor records its cameras on every tick."""
        if self.actor.frames == "auto":
            return self.robot.frames_with_observation
        return self.actor.frames == "every_tick"

    @property
    def frames_per_tick(self) -> float:
        """Frames of one camera per tick while the policy acts, in (0, 1]; a human's ticks have one each."""
        every = self.chunk.executed - self.actor.delay_ticks
        # Where windows end that begin at decisions, unless that is at another decision.
        return 1.0 if self.frames_every_tick else (1 if self.chunk.returned % every == 0 else 2) / every

    def _check_value_range(self) -> None:
        """A critic with a range must be able to say every return that rewards of 0, and 1 at a success, allow."""
        c, r, kind = self.agent.critic, self.reward, f"agent.critic.loss={self.agent.critic.loss}"
        require(r.scale > 0, f"{kind} needs reward.scale above 0, got {r.scale:g}")
        low, high = possible_returns(r, self.discount)
        dust = 1e-9 * max(1.0, abs(low), abs(high))  # of rounded sums
        # The range in the message, once set, holds them.
        least, most = math.floor((low + dust) * 1e4) / 1e4, math.ceil((high - dust) * 1e4) / 1e4
        require(
            c.value_low <= low + dust and high - dust <= c.value_high,
            f"{kind} needs returns in [{c.value_low:.12g}, {c.value_high:.12g}], and the reward settings allow "
            f"{least:.12g} to {most:.12g}: set agent.critic.value_low to {least:.12g} or less and "
            f"agent.critic.value_high to {most:.12g} or more; or change reward.scale, offset, failure_reward or "
            "intervention_penalty, or agent.critic.loss=squared",
        )
        require(
            c.value_low < low - dust or not self.robot.negative_rewards,
            f"{kind} needs returns in [{c.value_low:.12g}, {c.value_high:.12g}], and this robot's own rewards may be "
            "negative: set agent.critic.value_low to the least discounted return there can be, use "
            "robot.reward=sparse, or agent.critic.loss=squared",
        )

    def _check_shared_encoder(self) -> None:
        """A policy that Q has trained cannot keep up with the critic's encoder by imitation, as the warm-up has it."""
        a, loop = self.agent, self.learner
        shared = a.encoder.trained_by == "critic" and (a.image_keys or a.encoder.state_latent)
        climbs = isinstance(a, AcrlpdConfig) or (isinstance(a, AcfqlConfig) and a.actor_type == "distill-ddpg")
        require(
            not (shared and climbs and loop.offline_steps and loop.critic_warmup_steps and loop.online_steps != 0),
            f"learner.critic_warmup_steps={loop.critic_warmup_steps} trains the encoder by the critic's loss "
            "(agent.encoder.trained_by=critic) while the policy imitates alone, and learner.offline_steps="
            f"{loop.offline_steps} has trained that policy for more than that: set --config.learner."
            "critic_warmup_steps=0, which the offline phase makes needless, or agent.encoder.trained_by=each",
        )

    def _check_learned_gripper(self) -> None:
        gripper, chunk = self.agent.gripper, self.chunk
        held = gripper.hold_steps or chunk.executed
        require(
            chunk.executed % held == 0,
            f"agent.gripper.hold_steps={held} must divide the {chunk.executed} actions of a chunk that are executed "
            "(chunk.execute_steps, or chunk.horizon)",
        )
        require(
            chunk.critic_steps >= chunk.executed,
            f"agent.gripper.choices are for the {chunk.executed} actions of a chunk that are executed, and "
            f"chunk.critic_horizon={chunk.critic_steps} is less: choices for ticks that no return covers would never "
            f"be corrected. Leave chunk.critic_horizon out, or set chunk.execute_steps={chunk.critic_steps}",
        )
        require(
            gripper.penalty == 0 or self.agent.critic.target_floor == "none",
            f"agent.critic.target_floor=mc compares the targets with rewards alone, and agent.gripper.penalty="
            f"{gripper.penalty:g} adds to the grasp critic's: switch one of them off",
        )
        ranged = gripper.loss == "as_critic" and self.agent.critic.loss != "squared"
        require(
            not ranged or gripper.penalty == 0,
            f"agent.gripper.penalty={gripper.penalty:g} adds to returns, and agent.critic.loss="
            f"{self.agent.critic.loss} knows the range of the others alone: set agent.gripper.loss=squared",
        )
        require(
            gripper.penalty == 0 or (self.replay.windows == "episode" and chunk.returned == chunk.critic_steps),
            "agent.gripper.penalty counts changes within a window, the action before it included: use "
            "replay.windows=episode and leave chunk.return_steps out",
        )

"""An experiment: one tree of frozen dataclasses, validated where it is built.

Rates are per tick, times in seconds, sizes in steps unless a name says otherwise.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from serl_chunk.config.agents import AcfqlConfig, AgentConfig, BcConfig
from serl_chunk.config.chunks import ChunkConfig
from serl_chunk.config.replay import ReplayConfig
from serl_chunk.config.robots import RobotConfig
from serl_chunk.config.validation import require, require_choices


def return_for_ever(reward: float, discount: float) -> float:
    """The discounted sum of `reward` on every tick from now on."""
    return reward / (1 - discount)


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    """The one place where rewards are changed; applies to online data and demonstrations alike."""

    scale: float = 1.0
    offset: float = 0.0  # added to every step's scaled reward
    failure_reward: float = 0.0  # reward of the step on which a declared failure ends the episode
    intervention_penalty: float = 0.0  # subtracted from the effective reward of the last step before a take-over

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
    One take-over costs its penalty; an episode with several may return less, which a critic of a range does not tell.
    """
    ends = return_for_ever(reward.offset, discount), reward.scale + reward.offset, reward.failure_reward
    return min(ends) - reward.intervention_penalty, max(ends)


@dataclasses.dataclass(frozen=True)
class NormaliserConfig:
    """How observations and chunks enter model space (docs/architecture.md, section 3)."""

    actions: Literal["absolute_range", "absolute_demo", "relative", "norm_stats"] = "relative"
    state: bool = True  # mean/std of the demonstrations; False leaves states as they are
    norm_stats: str = ""  # a norm_stats.json instead of the demonstrations; read by the learner
    state_std_floor: float = 0.01
    action_scale_floor: float = 0.02  # in robot units; keeps a dimension the demonstrations never move from exploding
    extreme: float = 0.9  # where the demonstrations' extremes land, so that a tanh policy can express them

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
        require(0 < self.extreme <= 1, f"normaliser.extreme must be in (0, 1], got {self.extreme}")
        require(self.state_std_floor > 0, f"normaliser.state_std_floor must be positive, got {self.state_std_floor}")
        require(
            self.action_scale_floor > 0,
            f"normaliser.action_scale_floor must be positive, got {self.action_scale_floor}",
        )


@dataclasses.dataclass(frozen=True)
class LearnerConfig:
    """The training loop. Names shared with HIL-SERL's train_rlpd mean the same."""

    batch_size: int = 256  # windows per critic update
    cta_ratio: int = 1  # critic updates in one compiled update, the last followed by the policy's
    utd_ratio: float = 0.25  # critic updates per inserted online step; may be below 1 (the rate limiter)
    max_lag_steps: int = 200  # online steps a lockstep actor may run ahead of the updates they entitle to
    max_steps: int = 20_000  # critic updates of the online phase, those of the offline phase not among them
    training_starts: int = 100  # online steps before training
    steps_per_update: int = 50  # critic updates between publications
    pretrain_steps: int = 0  # policy-only (BC) updates on demonstrations before the first snapshot
    critic_pretrain_steps: int = 0  # critic updates on demonstrations before the first snapshot
    offline_steps: int = 0  # updates of everything (critic and policy) on demonstrations before the first snapshot
    online_steps: int | None = None  # online steps after which training ends; none: max_steps alone; 0: offline only
    eval_interval: int = 0  # updates between evaluations by the learner's own process (simulators); 0: none
    eval_episodes: int = 50
    # What is evaluated, here and by --eval_checkpoint_step: the deterministic policy, or with its exploration noise.
    eval_mode: Literal["mean", "sampled"] = "mean"
    video_episodes: int = 0  # of each evaluation, how many are filmed
    warmup_episodes: int = 0  # episodes with the frozen pretrained policy
    critic_warmup_steps: int = 0  # critic-only updates after the warm-up
    random_steps: int = 0  # HIL-SERL: uniform random actions at first; refused on a real robot
    checkpoint_period: int = 5_000  # critic updates between checkpoints; 0: only the last
    keep_checkpoints: int = 20
    log_period: int = 100  # critic updates between metric rows
    actor_timeout: float = 30.0  # seconds of silence after which an actor's open episode is closed as truncated

    def __post_init__(self) -> None:
        require_choices(self, "learner.")
        for name in (
            "batch_size",
            "cta_ratio",
            "eval_episodes",
            "max_steps",
            "steps_per_update",
            "keep_checkpoints",
            "log_period",
        ):
            require(getattr(self, name) >= 1, f"learner.{name} must be at least 1, got {getattr(self, name)}")
        for name in ("training_starts", "pretrain_steps", "critic_pretrain_steps", "warmup_episodes",
                     "critic_warmup_steps", "random_steps", "checkpoint_period", "offline_steps", "eval_interval",
                     "video_episodes"):  # fmt: skip
            require(getattr(self, name) >= 0, f"learner.{name} must be >= 0, got {getattr(self, name)}")
        require(
            self.online_steps is None or self.online_steps >= 0,
            f"learner.online_steps must be >= 0 (0: offline only) or none, got {self.online_steps}",
        )
        require(
            self.online_steps != 0 or self.offline_steps + self.pretrain_steps + self.critic_pretrain_steps > 0,
            "learner.online_steps=0 trains on demonstrations alone: set learner.offline_steps",
        )
        require(
            not self.online_steps or self.online_steps > self.training_starts,
            f"learner.online_steps={self.online_steps} is not above learner.training_starts={self.training_starts}: "
            "training would end before it begins. Raise the one or lower the other.",
        )
        require(
            self.video_episodes <= self.eval_episodes,
            f"learner.video_episodes={self.video_episodes} is above learner.eval_episodes={self.eval_episodes}",
        )
        require(self.batch_size % 2 == 0, f"learner.batch_size must be even, got {self.batch_size}")
        require(self.utd_ratio > 0, f"learner.utd_ratio must be positive, got {self.utd_ratio}")
        # A limiter that lets the actor run less ahead than one update needs would stop both sides for ever.
        need = self.cta_ratio / self.utd_ratio
        require(
            self.max_lag_steps >= need,
            f"learner.max_lag_steps={self.max_lag_steps} is below cta_ratio/utd_ratio={need:g}: the actor would wait "
            f"for an update that waits for the actor. Set max_lag_steps to at least {need:g}.",
        )
        require(self.actor_timeout > 0, f"learner.actor_timeout must be positive seconds, got {self.actor_timeout}")


@dataclasses.dataclass(frozen=True)
class ActorConfig:
    """The control loop (docs/architecture.md, section 7)."""

    clock: Literal["lockstep", "realtime"] = "lockstep"
    delay_ticks: int = 0  # lockstep: ticks between a decision's observation and its chunk
    inference: Literal["auto", "sync", "async"] = "auto"  # realtime; auto: sync if inference p99 < half a tick
    # Plan anew after the steps that a decision asks for (agent.replan_spread), instead of after execute_steps always.
    adaptive_execution: bool = False
    intervention: str = "none"  # none | scripted | path of a recorded intervention file
    max_human_ticks: int = 0  # the intervention source stops after so many ticks; 0: no limit
    max_episodes: int = 0  # 0: until the learner is done

    def __post_init__(self) -> None:
        require_choices(self, "actor.")
        for name in ("delay_ticks", "max_human_ticks", "max_episodes"):
            require(getattr(self, name) >= 0, f"actor.{name} must be >= 0, got {getattr(self, name)}")
        require(
            self.clock == "lockstep" or self.delay_ticks == 0,
            "actor.delay_ticks belongs to clock=lockstep; in real time the delay is measured, not set",
        )


@dataclasses.dataclass(frozen=True)
class TransportConfig:
    """Limits of the network side."""

    max_message_bytes: int = 64 << 20
    max_arrays: int = 64
    max_sessions: int = 32
    max_malformed: int = 32  # malformed messages of one connection, and one a second; more are dropped unread
    credit_bytes: int = 32 << 20  # unacknowledged bytes an actor may have in flight
    spool_bytes: int = 2 << 30  # unacknowledged bytes an actor keeps; when full, no new episode starts
    journal: bool = True  # the learner writes every record to its run folder before it acknowledges
    journal_bytes: int = 0  # size at which the oldest segments are dropped; 0: what a full replay does not need
    journal_days: float = 0.0  # age at which they are dropped; 0 for never
    sync_interval: float = 1.0  # seconds between fsyncs of journal and spool; 0: after every message
    # What an acknowledged record survives: the death of the learner's process, or a power cut.
    durability: Literal["process", "power"] = "process"
    jpeg_quality: int = 0  # 1..100: images leave the robot as JPEG, lossy, for slow links; 0: raw
    snapshots: Literal["exact", "bfloat16"] = "exact"  # bfloat16: half the bytes, rounded for acting
    piece_bytes: int = 1 << 20  # size of a snapshot piece
    heartbeat: float = 1.0  # seconds between signs of life
    silence: float = 5.0  # seconds after which the other side counts as gone

    def __post_init__(self) -> None:
        zero = ("jpeg_quality", "journal_bytes", "journal_days", "sync_interval")  # mean something at 0
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                least = "positive" if field.name not in zero else "0 or more"
                require(value > 0 or (value == 0 and field.name in zero), f"transport.{field.name} must be {least}")
        require(self.jpeg_quality <= 100, f"transport.jpeg_quality must be 0..100, got {self.jpeg_quality}")
        require_choices(self, "transport.")
        require(self.silence > 2 * self.heartbeat, "transport.silence must exceed two heartbeats")
        require(
            self.durability == "process" or 2 * self.sync_interval < self.silence,
            f"transport.durability=power acknowledges every sync_interval={self.sync_interval:g} s, and an actor that "
            f"hears of none for silence={self.silence:g} s connects anew: set sync_interval below half of silence",
        )
        require(self.max_arrays <= 65000, "transport.max_arrays must be at most 65000: a journal entry holds no more")
        require(self.max_message_bytes < 2**32, "transport.max_message_bytes must be below 4 GiB")
        require(
            self.credit_bytes <= self.spool_bytes,
            f"transport.credit_bytes={self.credit_bytes} exceeds spool_bytes={self.spool_bytes}",
        )


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
        step_reward = self.reward.offset
        if step_reward < 0:
            worst = return_for_ever(step_reward, self.discount)
            named = math.floor(worst * 1e4) / 1e4  # whoever sets what he read is within the bound
            require(
                self.reward.failure_reward <= worst,
                f"reward.offset={step_reward} makes every step cost something, so failing early would pay: "
                f"set reward.failure_reward to at most offset/(1-discount)={named:.12g} "
                f"(it is {self.reward.failure_reward})",
            )
        if self.agent.critic.loss != "squared":
            self._check_value_range()
        require(
            self.agent.critic.target_floor == "none" or self.replay.windows == "episode",
            "agent.critic.target_floor=mc needs the return to an episode's end, and windows of replay.windows=adjacent "
            "belong to no episode: set replay.windows=episode, or agent.critic.target_floor=none",
        )
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

    def _check_value_range(self) -> None:
        """A critic with a range must be able to say every return that rewards of 0, and 1 at a success, allow."""
        c, r, kind = self.agent.critic, self.reward, f"agent.critic.loss={self.agent.critic.loss}"
        require(r.scale > 0, f"{kind} needs reward.scale above 0, got {r.scale:g}")
        low, high = possible_returns(r, self.discount)
        dust = 1e-9 * max(1.0, abs(low), abs(high))  # of rounded sums
        # Whoever sets what he read has a range that holds them.
        least, most = math.floor((low + dust) * 1e4) / 1e4, math.ceil((high - dust) * 1e4) / 1e4
        require(
            c.value_low <= low + dust and high - dust <= c.value_high,
            f"{kind} needs returns in [{c.value_low:.12g}, {c.value_high:.12g}], and the reward settings allow "
            f"{least:.12g} to {most:.12g}: set agent.critic.value_low to {least:.12g} or less and "
            f"agent.critic.value_high to {most:.12g} or more; or change reward.scale, offset or failure_reward, or "
            "agent.critic.loss=squared",
        )
        require(
            c.value_low < low - dust or not self.robot.negative_rewards,
            f"{kind} needs returns in [{c.value_low:.12g}, {c.value_high:.12g}], and this robot's own rewards may be "
            "negative: set agent.critic.value_low to the least discounted return there can be, use "
            "robot.reward=sparse, or agent.critic.loss=squared",
        )

    def _check_learned_gripper(self) -> None:
        gripper, chunk = self.agent.gripper, self.chunk
        held = gripper.hold_steps or chunk.horizon
        require(
            chunk.horizon % held == 0,
            f"agent.gripper.hold_steps={held} must divide chunk.horizon={chunk.horizon}",
        )
        require(
            chunk.critic_steps == chunk.horizon,
            f"agent.gripper.choices need chunk.critic_horizon ({chunk.critic_steps}) to be the chunk.horizon of "
            f"{chunk.horizon}: choices for ticks that no return covers would never be corrected. Leave it out",
        )
        require(
            chunk.executed == chunk.horizon,
            f"agent.gripper.choices need chunk.execute_steps ({chunk.executed}) to be the chunk.horizon of "
            f"{chunk.horizon}: a choice that is not executed for as long as it was made for would never be corrected. "
            "Leave chunk.execute_steps out, and with it agent.prefix_critic, which is for critics of more than what is "
            "executed",
        )
        ranged = gripper.loss == "as_critic" and self.agent.critic.loss != "squared"
        require(
            not ranged or gripper.penalty == 0,
            f"agent.gripper.penalty={gripper.penalty:g} adds to returns, and agent.critic.loss="
            f"{self.agent.critic.loss} knows the range of the others alone: set agent.gripper.loss=squared",
        )
        require(
            gripper.penalty == 0 or (self.replay.windows == "episode" and chunk.returned == chunk.horizon),
            "agent.gripper.penalty counts changes within a window, the action before it included: use "
            "replay.windows=episode and leave chunk.return_steps out",
        )

"""An experiment: one tree of frozen dataclasses, validated where it is built, and here across its parts.

An experiment's file finds all parts but the agent's and the robot's in this module. Rates are per tick, times in
seconds, sizes in steps unless a name says otherwise.
"""

from __future__ import annotations

import dataclasses
import math

from serl_chunk.config.actor import ActorConfig
from serl_chunk.config.agents import AcfqlConfig, AcrlpdConfig, AgentConfig, BcConfig
from serl_chunk.config.chunks import ChunkConfig
from serl_chunk.config.learner import LearnerConfig
from serl_chunk.config.normaliser import NormaliserConfig
from serl_chunk.config.replay import ReplayConfig
from serl_chunk.config.reward import RewardConfig, possible_returns, return_for_ever
from serl_chunk.config.robots import RobotConfig
from serl_chunk.config.transport import TransportConfig
from serl_chunk.config.validation import require

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
            worst = return_for_ever(step_reward, self.discount)
            named = math.floor(worst * 1e4) / 1e4  # whoever sets what he read is within the bound
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
            "agent.critic.target_floor=mc needs the return to an episode's end, and windows of replay.windows=adjacent "
            "belong to no episode: set replay.windows=episode, or agent.critic.target_floor=none",
        )
        r, of_people = self.replay, self.agent.bc_on in ("interventions", "demo+interventions")
        require(
            r.windows == "episode" or r.demo_fraction != 1 or not of_people or self.learner.online_steps == 0,
            f"agent.bc_on={self.agent.bc_on} imitates what people do online, and replay.windows=adjacent with "
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

"""An experiment: one tree of frozen dataclasses, validated where it is built, and here across its parts.

An experiment's file finds most parts in this module. Rates are per tick, times in seconds, sizes in steps unless a name
says otherwise.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.config.agents.base import AgentConfig, BcOn
from serl_chunk.config.agents.groups import GroupAgentConfig
from serl_chunk.config.fields import (
    CAMERAS,
    CRITIC,
    NOT_CONSTANT,
    TRAINED,
    Group,
    Requirement,
    acting,
    derived,
    needs,
    optional,
    require,
    setting,
)
from serl_chunk.config.groups import ITERATES, GroupConfig
from serl_chunk.config.operator import DeviceConfig, OperatorConfig
from serl_chunk.config.outcome import OutcomeConfig
from serl_chunk.config.robots import RobotConfig
from serl_chunk.config.transport import TransportConfig


@dataclasses.dataclass(frozen=True)
class ChunkConfig(Group, path="chunk."):
    """Lengths. Default: all equal `horizon`. The experiment checks what an agent makes of them."""

    horizon: int = derived(5, "actions the policy outputs", unit="ticks", least=1)
    critic_horizon: int | None = setting(None, "actions the critic scores; none: horizon", unit="ticks", least=1)
    execute_steps: int | None = derived(None, "where the next chunk follows; none: horizon", unit="ticks")
    return_steps: int | None = setting(None, "rewards before the target bootstraps; none: critic_horizon", unit="ticks")

    def _check(self) -> None:
        # fmt: off
        require(1 <= self.executed <= self.horizon, "chunk.execute_steps",
            f"must be 1..{self.horizon} (chunk.horizon), got {self.execute_steps}")
        require(self.returned >= self.critic_steps, "chunk.return_steps",
            f"must be at least chunk.critic_horizon={self.critic_steps}, got {self.return_steps}: the target would "
            "bootstrap in the middle of the actions the critic scores. Raise it, or leave it out.")

    def check_scored(self, *, prefix_critic: bool) -> None:
        """Raise ConfigError unless a critic scores what is executed; a longer one needs a prefix critic for that."""
        # fmt: off
        if prefix_critic:
            require(self.critic_steps > self.executed, "chunk.critic_horizon",
                f"must be above chunk.execute_steps={self.executed} with decoupled critics, which learn the value of "
                f"the executed actions from a critic of more, got {self.critic_steps}")
            return
        require(self.critic_steps <= self.horizon, "chunk.critic_horizon",
            f"must be 1..{self.horizon} (chunk.horizon), got {self.critic_horizon}: the policy outputs no more actions "
            "to score. Lower it, or use preset=decoupled, whose second critic scores the executed ones.")
        require(self.executed >= self.critic_steps, "chunk.execute_steps",
            f"{self.executed} is below chunk.critic_horizon={self.critic_steps}: the critic would score actions that "
            "are never executed, so nothing corrects the tail's value. Lower chunk.critic_horizon, execute the whole "
            "chunk, or use preset=decoupled.")

    @property
    def carried(self) -> int:
        """Actions of a training window: as many as the policy outputs, or the critic scores where that is more."""
        return max(self.horizon, self.critic_steps)

    @property
    def critic_steps(self) -> int:
        return self.horizon if self.critic_horizon is None else self.critic_horizon

    @property
    def executed(self) -> int:
        return self.horizon if self.execute_steps is None else self.execute_steps

    @property
    def returned(self) -> int:
        return self.critic_steps if self.return_steps is None else self.return_steps


UNBOUNDED = ("openpi",)
"""Values of `normaliser.actions` whose model space has no bounds; that of the others is [-1, 1]."""
_AS_OPENPI = needs("normaliser.actions", "openpi")


@dataclasses.dataclass(frozen=True)
class NormaliserConfig(Group, path="normaliser."):
    """How observations and chunks enter model space (docs/architecture.md, section 3)."""

    actions: Literal["absolute_range", "absolute_demo", "relative", "norm_stats", "openpi"] = setting(
        "relative",
        "scaled by the robot's limits, by the demonstrations, relative to the state, by norm_stats, or as openpi does",
    )
    state: bool = setting(True, "mean and deviation of the demonstrations; False leaves states unchanged")
    norm_stats: str = setting("", "a norm_stats.json in place of the demonstrations, at the learner")
    demo_range: float = setting(0.9, "the demonstrations' extremes in model space, for tanh", above=0, most=1)
    scaling: Literal["z_score", "quantiles"] = setting(
        "z_score", "by mean and deviation (pi0), or q01 and q99 (pi0.5)", requires=_AS_OPENPI
    )
    delta_mask: tuple[int, ...] = setting(
        (),
        "actions that are differences from the chunk's first state: so many are, so many (below 0) are not, ...; "
        "6,-1,6,-1 for an ALOHA. Empty: none",
        requires=_AS_OPENPI,
    )
    robot: Literal["none", "aloha"] = setting(
        "none",
        "units of the model's training in place of the robot's: joint signs, gripper angles",
        requires=_AS_OPENPI,
    )

    def _check(self) -> None:
        # fmt: off
        by_file = self.actions in ("norm_stats", "openpi")
        require(bool(self.norm_stats) or not by_file, "normaliser.norm_stats",
            f"missing, and normaliser.actions={self.actions} reads it. Give the file that `serl-chunk data stats` "
            "writes, or with openpi that of a checkpoint.")
        require(not self.norm_stats or self.state or by_file, "normaliser.norm_stats",
            f"{self.norm_stats} has no effect. Set normaliser.state=True, or normaliser.actions=norm_stats.")
        require(0 not in self.delta_mask, "normaliser.delta_mask",
            f"must be lengths above or below 0, got {self.delta_mask}. Write 6,-1,6,-1 for six actions that are "
            "differences, one that is not, six that are, one that is not.")

    @property
    def bounded(self) -> bool:
        """Return whether model space is [-1, 1] in every number of an action."""
        return self.actions not in UNBOUNDED


def infinite_horizon_return(reward: float, discount: float) -> float:
    """Return the discounted sum of `reward` on every tick from now on."""
    return reward / (1 - discount)


@dataclasses.dataclass(frozen=True)
class RewardConfig(Group, path="reward."):
    """The one place where rewards are changed; applies to online data and demonstrations alike."""

    scale: float = setting(1.0, "factor of every step's reward")
    offset: float = setting(0.0, "added to every step's scaled reward")
    failure_reward: float = acting(0.0, "reward of the step on which a declared failure ends the episode")


def possible_returns(reward: RewardConfig, discount: float, stages: float = 0.0) -> tuple[float, float]:
    """Return the least and the greatest discounted return from any step on, for recorded rewards of 0, and 1 at a
    success; `stages` are recorded before one (`outcome.stage_reward` for each class but the last of the longest chain).

    k steps of the offset c and an end e return c (1 - gamma^k) / (1 - gamma) + gamma^k e, which lies between e and c /
    (1 - gamma); e is a success, a declared failure, or none (a truncated episode counts as going on for ever).
    """
    ends = infinite_horizon_return(reward.offset, discount), reward.scale + reward.offset, reward.failure_reward
    return min(ends), max(ends) + reward.scale * stages


_SUCCESSES = Requirement(
    "agent.bc_on=+successes, or agent.bc_on=none and a human who intervenes", lambda c: c.imitated == "+successes"
)
_DECODED = (CAMERAS, needs("agent.encoder.cache_features", False, note="features stand for decoded frames"))


@dataclasses.dataclass(frozen=True)
class ReplayConfig(Group, path="replay."):
    """Stores and sampling (docs/architecture.md, section 4)."""

    capacity: int = setting(200_000, "size of the online ring", unit="steps", least=1)
    demo_capacity: int = setting(100_000, "demonstrations; more is refused, never evicted", unit="steps", least=1)
    human_capacity: int = setting(50_000, "kept of evicted episodes with interventions", unit="steps", least=1)
    image_capacity: int = setting(20_000, "frames per camera and store", unit="frames", least=1, requires=CAMERAS)
    frame_cache_bytes: int = setting(
        1 << 30, "decoded frames kept of demonstrations with images in files; 0: none", unit="bytes", least=0, off=0,
        requires=_DECODED,
    )  # fmt: skip
    demo_fraction: float | Literal["uniform"] = setting(0.5, "demonstrations in a batch", least=0, most=1)
    positive_fraction: float | None = setting(None, "successes among demonstrations; none: all alike", above=0, below=1)
    terminal_windows: Literal["keep", "drop"] = setting("keep", "windows that reach beyond their episode's end")
    # qc is Q-chunking's published sampler, for comparisons; `valid` marks the ends.
    windows: Literal["episode", "qc"] = setting("episode", "within an episode, or neighbouring rows of any")
    dataset_replace_interval: int = setting(1_000, "between two shards of a data set", unit="updates", least=1)
    # The policy acts with pictures of age 0.
    max_image_age: int = setting(0, "age of a window's picture", unit="ticks", least=0, requires=CAMERAS)
    exclude_before_takeover: float = setting(
        0.8,
        "part of a success before an intervention that is not imitated",
        unit="s",
        least=0,
        requires=(_SUCCESSES, NOT_CONSTANT),
    )
    on_device: Literal["auto", "on", "off"] = setting(
        "auto",
        "steps mirrored on the device, where updates gather their windows; auto: with an accelerator, where possible",
    )
    prefetch: int = setting(2, "batches prepared ahead by a thread; 0: the training thread samples", least=0)

    def _check(self) -> None:
        # fmt: off
        require(self.exclude_before_takeover <= 30, "replay.exclude_before_takeover",
            f"must be at most 30 seconds, got {self.exclude_before_takeover:g}. Divide a number of ticks by the robot's"
            " control_hz.")
        # config.json then holds a float: a whole number there is of a version that counted ticks.
        object.__setattr__(self, "exclude_before_takeover", float(self.exclude_before_takeover))
        require(self.positive_fraction is None or self.demo_fraction not in ("uniform", 0), "replay.positive_fraction",
            f"{self.positive_fraction} has no effect without a part of demonstrations. Set replay.demo_fraction above "
            "0, or set it to none.")
        of_episodes = {"terminal_windows": "drop", "positive_fraction": None}
        for name, value in of_episodes.items():
            require(self.windows == "episode" or getattr(self, name) == value, "replay.windows",
                f"qc needs replay.{name}={value}, got {getattr(self, name)}: its windows belong to no episode")


_OF_CRITIC = {"requires": CRITIC, "off": 0}
_LIMITED = Requirement(
    "a number in learner.utd_ratio (none: neither side waits)", lambda c: c.learner.utd_ratio is not None
)
_CUT = Requirement("learner.fsdp_devices above 1", lambda c: c.learner.fsdp_devices > 1)
_PHASES = Requirement("an agent that trains in phases (groups have group.iterations)", lambda c: not c.agent.iterates)


@dataclasses.dataclass(frozen=True)
class LearnerConfig(Group, path="learner."):
    """The training loop. Names shared with HIL-SERL's train_rlpd mean the same."""

    batch_size: int = setting(256, "windows per critic update, an even number", least=1)
    policy_batch_size: int | None = setting(
        None,
        "windows of a policy's update; none: those of the last critic update before it",
        least=1,
        requires=TRAINED,
        off=None,
    )
    accumulate: int = setting(1, "micro-batches that an update's gradients are summed over", least=1)
    fsdp_devices: int = setting(1, "devices over which large arrays of networks are cut; 1: none is", least=1)
    fsdp_least: float = setting(4.0, "size from which an array is cut", unit="MiB", least=0, requires=_CUT)
    cta_ratio: int = setting(1, "critic updates in one compiled update, the last followed by the policy's", least=1)
    utd_ratio: float | None = setting(0.25, "critic updates per inserted online step; none: no side waits", above=0)
    max_lag_steps: int = setting(200, "lockstep steps ahead of the updates they allow", unit="steps", requires=_LIMITED)
    max_steps: int = setting(20_000, "critic updates of the online phase", unit="updates", least=1, requires=_PHASES)
    training_starts: int = setting(100, "online steps before training", unit="steps", least=0)
    steps_per_update: int = setting(50, "critic updates between publications", unit="updates", least=1)
    start_from: str = setting("", "run folder, or FOLDER:CHECKPOINT, whose policy and normaliser a new run begins with")
    pretrain_steps: int = setting(0, "policy-only (BC) updates before the first snapshot", unit="updates", least=0)
    critic_pretrain_steps: int = setting(0, "critic updates before the first snapshot", least=0, **_OF_CRITIC)
    offline_steps: int = setting(
        0, "updates of all before the first snapshot", unit="updates", least=0, requires=_PHASES, off=0
    )
    online_steps: int | None = setting(
        None, "end of training; none: max_steps; 0: offline only", unit="steps", least=0, requires=_PHASES
    )
    eval_interval: int = setting(
        0, "between the learner's evaluations (simulators); 0: none", unit="updates", least=0, requires=_PHASES, off=0
    )
    eval_episodes: int = setting(50, "episodes of each of these evaluations", unit="episodes", least=1)
    eval_mode: Literal["mean", "sampled"] = setting("mean", "evaluate without or with exploration noise")
    video_episodes: int = setting(0, "episodes of each evaluation that are filmed", unit="episodes", least=0)
    warmup_episodes: int = setting(
        0, "episodes with the frozen pretrained policy", unit="episodes", least=0, requires=_PHASES, off=0
    )
    random_steps: int = acting(0, "uniform random actions at first; not on a real robot", unit="steps", least=0)
    checkpoint_period: int = setting(
        5_000, "updates between checkpoints; 0: only the last", unit="updates", least=0, requires=_PHASES
    )
    keep_checkpoints: int = setting(20, "checkpoints that are kept, and exports of export_period", least=1)
    checkpoint_bytes: int = setting(
        0, "size of kept checkpoints, the timed one and exports; the newest stays; 0: any", unit="bytes", least=0
    )
    export_period: int = setting(
        0,
        "updates between exports of pi0 as openpi's checkpoints, in the run's exports/<step>; 0: none",
        unit="updates",
        least=0,
        requires=(_PHASES, needs("agent.policy", "pi0")),
        off=0,
    )
    log_period: int = setting(100, "critic updates between metric rows", unit="updates", least=1)

    def _check(self) -> None:
        # fmt: off
        require(self.online_steps != 0 or self.offline_steps + self.pretrain_steps + self.critic_pretrain_steps > 0,
            "learner.online_steps",
            "0 trains on demonstrations alone. Set learner.offline_steps.")
        require(not self.online_steps or self.online_steps > self.training_starts, "learner.online_steps",
            f"{self.online_steps} is not above learner.training_starts={self.training_starts}: training would end "
            "before it begins. Raise the one or lower the other.")
        require(self.video_episodes <= self.eval_episodes, "learner.video_episodes",
            f"must be at most learner.eval_episodes={self.eval_episodes}, got {self.video_episodes}")
        for name, size in (("batch_size", self.batch_size), ("policy_batch_size", self.policy_batch_size)):
            require(size is None or size % 2 == 0, f"learner.{name}", f"must be even, got {size}")
            require(size is None or size % self.accumulate == 0, "learner.accumulate",
                f"must divide learner.{name}={size}, got {self.accumulate}")
        # A limiter that gives the actor fewer steps than one update needs would stop both sides permanently.
        need = 0 if self.utd_ratio is None else self.cta_ratio / self.utd_ratio
        require(self.max_lag_steps >= need, "learner.max_lag_steps",
            f"must be at least cta_ratio/utd_ratio={need:g}, got {self.max_lag_steps}: the actor would wait for an "
            "update that waits for the actor")


_REALTIME = needs("actor.clock", "realtime")
_INTERVENED = Requirement("actor.intervention", lambda c: c.actor.intervention != "none")
_SERVED = Requirement("actor.policy", lambda c: bool(c.actor.policy))


@dataclasses.dataclass(frozen=True)
class ActorConfig(Group, path="actor."):
    """The control loop (docs/architecture.md, section 7)."""

    clock: Literal["lockstep", "realtime"] = acting("lockstep", "wait for every chunk (simulators), or keep the rate")
    delay_ticks: int = derived(0, "lockstep: from a decision's observation to its chunk", unit="ticks", least=0)
    inference: Literal["auto", "sync", "async"] = derived(
        "auto", "auto: sync if the 99th percentile of inference is below half a tick", requires=_REALTIME
    )
    adaptive_execution: bool = acting(False, "plan anew after the steps that a decision asks for (agent.replan_spread)")
    # auto: every tick where frames come with the observation (gym environments), else decisions.
    frames: Literal["auto", "every_tick", "decisions"] = setting(
        "auto", "record cameras on every tick, or at decisions, their windows' ends and by humans", requires=CAMERAS
    )
    intervention: str = setting(
        "none", "none, scripted, a device (spacemouse, gamepad, keyboard, gello), or a recorded file"
    )
    max_human_ticks: int = setting(
        0, "interventions of a run end after so long; 0: no limit", unit="ticks", least=0,
        requires=_INTERVENED,
    )  # fmt: skip
    max_episodes: int = setting(0, "0: until the learner is done", unit="episodes", least=0)
    attempts: int = setting(
        3, "of a task from where the scene lies, without a success in a row, before a reset (--undone_by)", least=1
    )
    block_steps: int = setting(
        0, "steps sent together, which a kill may cost; 0: a decision's in lockstep without a person, else each",
        unit="ticks", least=0,
    )  # fmt: skip
    gate: Literal["none", "canary"] = setting(
        "none", "canary: a new snapshot has every fourth episode first, and is dropped where it is worse"
    )
    policy: str = setting(
        "", "openpi://HOST:PORT, a policy server that decides; empty: the learner's policy, or a checkpoint's"
    )
    policy_key: str = optional(
        "", "file with its API key; empty: that of SERL_CHUNK_POLICY_KEY, or none", requires=_SERVED
    )
    policy_timeout: float = setting(
        0.0, "longest wait for that server before its first answer; 0: no limit", unit="s", least=0, requires=_SERVED
    )
    policy_observation: tuple[str, ...] = optional(
        (),
        "what it is sent, as observation/image=images/front observation/state=state[0:7]; empty: as of an ALOHA",
        requires=_SERVED,
    )

    def _check(self) -> None:
        # fmt: off
        require(self.clock == "lockstep" or self.delay_ticks == 0, "actor.delay_ticks",
            f"must be 0 without actor.clock=lockstep, got {self.delay_ticks}: in real time the delay is measured")
        require(self.clock == "lockstep" or self.block_steps <= 1, "actor.block_steps",
            f"must be 0 or 1 without actor.clock=lockstep, got {self.block_steps}: what a robot did is kept at once")
        require(not self.policy or self.policy.startswith("openpi://"), "actor.policy",
            f"must be openpi://HOST:PORT, or nothing, got {self.policy!r}")
        require(not self.policy or self.gate == "none", "actor.gate",
            f"canary compares a learner's snapshots, and actor.policy={self.policy} decides. Leave one of them out.")

    def without_human_limit(self) -> ActorConfig:
        return dataclasses.replace(self, max_human_ticks=0)


@dataclasses.dataclass(frozen=True)
class ExperimentConfig(Group):
    """Everything about one experiment."""

    name: str = setting(dataclasses.MISSING, "name of the experiment, of its run folders and spools")
    robot: RobotConfig = derived(dataclasses.MISSING, "the robot or simulator")
    agent: AgentConfig = setting(AcfqlConfig, "the algorithm")
    chunk: ChunkConfig = setting(ChunkConfig, "lengths of chunks")
    normaliser: NormaliserConfig = setting(NormaliserConfig, "scaling of states and actions")
    reward: RewardConfig = setting(RewardConfig, "changes of rewards")
    device: DeviceConfig = setting(DeviceConfig, "the device of a human operator")
    operator: OperatorConfig = setting(OperatorConfig, "keys of a human operator")
    outcome: OutcomeConfig = setting(OutcomeConfig, "what ends an episode as a success")
    group: GroupConfig = setting(GroupConfig, "iterations on groups of episodes", requires=ITERATES)
    replay: ReplayConfig = setting(ReplayConfig, "the learner's memory")
    learner: LearnerConfig = setting(LearnerConfig, "the training loop")
    actor: ActorConfig = setting(ActorConfig, "the control loop")
    transport: TransportConfig = setting(TransportConfig, "the network")
    discount: float = setting(0.985, "gamma per tick; choose gamma**T near 0.2 at the time limit T", above=0, below=1)
    seed: int = setting(42, "seed of everything random", least=0, below=2**31 - 1)
    preset: str = setting("", "the algorithm that --preset applied (record only)")
    compat: str = setting("", "the conventions that --compat applied (record only)")

    def _check(self) -> None:
        # fmt: off
        agent, chunk, loop, reward = self.agent, self.chunk, self.learner, self.reward
        worst = infinite_horizon_return(min(reward.offset, 0.0), self.discount)
        named = math.floor(worst * 1e4) / 1e4  # the value in the message, once set, is within the bound
        require(reward.offset >= 0 or reward.failure_reward <= worst, "reward.failure_reward",
            f"must be at most offset/(1-discount)={named:.12g} with reward.offset={reward.offset}, got "
            f"{reward.failure_reward}: every step costs something, so failing early would pay")
        if not agent.has_critic:
            require(loop.online_steps != 0 or loop.offline_steps + loop.pretrain_steps > 0, "learner.online_steps",
                f"0 trains on demonstrations alone, and learner.critic_pretrain_steps={loop.critic_pretrain_steps} "
                f"trains nothing of {agent.kind}, which has no critic. Set learner.pretrain_steps or "
                "learner.offline_steps.")
        require(self.replay.windows != "qc" or agent.as_pi0 is None, "replay.windows",
            "qc has states alone, and pi0 sees pictures or a text. Set it to episode.")
        require(NOT_CONSTANT.met(self) or not loop.pretrain_steps, "learner.pretrain_steps",
            f"{loop.pretrain_steps} trains nothing: with agent.pi0.trainable=none the policy is constant. Set it to 0, "
            "or agent.pi0.trainable to expert or lora_expert.")
        if agent.bounded_critic:
            require(reward.scale > 0, "reward.scale",
                f"must be above 0 for agent {agent.kind}, whose critic's range follows from the rewards, got "
                f"{reward.scale:g}")
            require(not self.robot.negative_rewards, "robot.reward",
                f"dense gives rewards below 0, and the range of the critic of agent {agent.kind} follows from "
                "reward.* alone. Set robot.reward=sparse, or use --preset qc, whose critic has none.")
        only_demos = (self.replay.windows, self.replay.demo_fraction) == ("qc", 1) and loop.online_steps != 0
        require(self.imitated not in ("interventions", "demo+interventions") or not only_demos, "agent.bc_on",
            f"{self.imitated} imitates human steps online, and replay.windows=qc with replay.demo_fraction=1 draws "
            "demonstrations alone. Set replay.windows=episode, or agent.bc_on=demo.")
        require(all(self.robot.tasks) or not agent.language.reads, "robot.task",
            f"empty, and agent.language.tokenizer={agent.language.tokenizer} reads it. Set it to the task in words, or "
            "agent.language.tokenizer=none.")
        self._check_bounds()
        chunk.check_scored(prefix_critic=agent.prefix_critic)
        require(chunk.executed % agent.prefix_lengths == 0, "agent.prefix_lengths",
            f"must divide chunk.execute_steps={chunk.executed} into equal parts, got "
            f"{agent.prefix_lengths}")
        require(not self.actor.adaptive_execution or agent.replan_spread is not None,
            "actor.adaptive_execution",
            "True has no effect without agent.replan_spread. Set that, with preset=decoupled and agent.prefix_lengths "
            "of 2 or more.")
        require(self.learner.policy_batch_size is None or agent.own_policy_batch,
            "learner.policy_batch_size",
            f"{self.learner.policy_batch_size} has no effect on {agent.kind}, whose policy learns from the critic's "
            "batch. Set it to none, or use acfql or acrlpd (without --compat qc).")
        if agent.gripper.composition == "learned":
            self._check_learned_gripper()
        require(not (self.actor.policy and self.robot.real) or self.actor.clock == "realtime", "actor.clock",
            "lockstep sends a real robot no command while a policy server (actor.policy) is waited for. Set "
            "actor.clock=realtime")
        require(self.actor.delay_ticks < chunk.executed, "actor.delay_ticks",
            f"must be below chunk.execute_steps={chunk.executed}, got {self.actor.delay_ticks}: a chunk that arrives "
            "after it should have been executed leaves the robot holding")
        if isinstance(agent, GroupAgentConfig):
            agent.check_sampling(self.group)
            self._check_iterations()

    @property
    def imitated(self) -> BcOn:
        """What `agent.bc_on` comes to: without a human, a policy that imitates itself drifts."""
        helped = self.actor.intervention != "none" or self.agent.clones_successes
        return self.agent.bc_on or ("+successes" if helped else "demo+interventions")

    @property
    def eval_interval(self) -> int:
        """Updates, or iterations, between the learner's own evaluations; 0: none."""
        return self.group.eval_every if self.agent.iterates else self.learner.eval_interval

    @property
    def eval_modes(self) -> tuple[str, ...]:
        """What each of them evaluates, the mean policy or the sampled one."""
        return ("mean", "sampled") if self.agent.iterates else (self.learner.eval_mode,)

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

    @property
    def block_steps(self) -> int:
        """Return how many steps an actor hands to the network together."""
        alone = self.actor.clock == "lockstep" and self.actor.intervention in ("none", "scripted")
        return self.actor.block_steps or (self.chunk.executed if alone else 1)

    @property
    def value_range(self) -> tuple[float, float] | None:
        """Return the least and the greatest return of a critic that is bounded by them; None: the critic is not."""
        if not self.agent.bounded_critic:
            return None
        stages = self.outcome.stage_reward * (self.outcome.longest - 1)
        return possible_returns(self.reward, self.discount, stages)

    def _check_iterations(self) -> None:
        """Raise ConfigError for what makes episodes that are not of one policy."""
        # fmt: off
        kind, loop, actor, size = self.agent.kind, self.learner, self.actor, self.group.minibatch
        require(size % loop.accumulate == 0, "learner.accumulate",
            f"must divide group.minibatch={size}, got {loop.accumulate}")
        require(loop.online_steps != 0, "learner.online_steps",
            f"0 trains without actors, and agent {kind} on what they collect. Leave it out.")
        require(loop.random_steps == 0, "learner.random_steps",
            f"{loop.random_steps} are of no policy, and agent {kind} trains on what its policy samples. Set it to 0.")
        require(actor.clock == "lockstep", "actor.clock",
            f"must be lockstep for agent {kind}, whose decisions are executed from their first action on, got "
            f"{actor.clock}")
        require(actor.delay_ticks == 0, "actor.delay_ticks",
            f"must be 0 for agent {kind}, whose decisions are executed from their first action on, got "
            f"{actor.delay_ticks}")
        require(self.transport.snapshot_dtype == "exact", "transport.snapshot_dtype",
            f"must be exact for agent {kind}: with bfloat16 actors would sample from another policy than the learner "
            "scores.")
        for name, value in (("policy", actor.policy), ("gate", actor.gate.replace("none", ""))):
            require(not value, f"actor.{name}",
                f"{value} has no effect on agent {kind}, whose episodes are all of the learner's newest policy. Leave "
                "it out.")

    def _check_bounds(self) -> None:
        # fmt: off
        agent, mode = self.agent, self.normaliser.actions
        unbounded = f"{mode} has no bounds, and "
        require(self.normaliser.bounded or not agent.squashed, "normaliser.actions",
            f"{unbounded}the policy of agent {agent.kind} is the tanh of a Gaussian, within [-1, 1]. Use a flow "
            "(acfql, or bc with agent.policy=flow), or set it to relative, absolute_range, absolute_demo or "
            "norm_stats.")
        bins = agent.reads_bins and mode == "openpi"
        require(not bins or self.normaliser.scaling == "quantiles", "normaliser.scaling",
            "must be quantiles with agent.pi0.pi05=True, whose prompt holds the state in bins of [-1, 1], got z_score.")
        # The values are of model space, where -1 and 1 are the ends of a gripper's range.
        continuous = agent.gripper.composition == "continuous" or agent.gripper.kept
        require(self.normaliser.bounded or continuous, "normaliser.actions",
            f"{unbounded}agent.gripper sets grippers to values within [-1, 1]. Leave agent.gripper out, or set it to "
            "relative, absolute_range, absolute_demo or norm_stats.")

    def _check_learned_gripper(self) -> None:
        # fmt: off
        gripper, chunk = self.agent.gripper, self.chunk
        held = gripper.hold_steps or chunk.executed
        require(chunk.executed % held == 0, "agent.gripper.hold_steps",
            f"must divide the {chunk.executed} executed actions of a chunk (chunk.execute_steps, or chunk.horizon), "
            f"got {held}")
        require(chunk.critic_steps >= chunk.executed, "agent.gripper.choices",
            f"they are for the {chunk.executed} executed actions of a chunk, and "
            f"chunk.critic_horizon={chunk.critic_steps} is less: no return would correct the others. Leave "
            f"chunk.critic_horizon out, or set chunk.execute_steps={chunk.critic_steps}.")
        if gripper.penalty == 0:
            return
        penalty = f"{gripper.penalty:g}"
        require(self.replay.windows == "episode" and chunk.returned == chunk.critic_steps, "agent.gripper.penalty",
            f"{penalty} counts changes within a window, the action before it included. Use replay.windows=episode and "
            "leave chunk.return_steps out.")

"""The sizes that an agent is built for; imports no JAX."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from serl_chunk.config.agents.encoder import shown
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.groups import GroupConfig
from serl_chunk.types import FEATURE_PREFIX, CameraSpec, RobotSpec

# Entries of an observation as a critic sees it: a discrete gripper's choice for the chunk, and the policy's features.
GRIPPER = "gripper"
POLICY_FEATURES = FEATURE_PREFIX + "policy"


class BatchSpec(NamedTuple):
    """What a batch shows, for the agent that asks for it."""

    size: int | None = None  # windows; None: `learner.batch_size`
    each: bool = True  # one for each critic update of a call, or one for the call
    next_observations: bool = True  # whether it has the observations that windows end on
    frames: bool | None = None  # whether it has pixels; None: where no features are kept in their place
    imitated: bool = False  # whether it has only windows of which something is imitated, if there are such


class FeatureSpec(NamedTuple):
    """A feature of observations that the replay keeps: float16[N, *shape], computed of the entries that it reads."""

    shape: tuple[int, ...]
    reads: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class AgentSpec:
    """The sizes that an agent is built for."""

    state_dim: int
    action_dim: int
    horizon: int  # H of the policy
    critic_steps: int  # actions the critic scores; more than horizon with a prefix critic only
    cameras: tuple[CameraSpec, ...]  # with the size of the frames that it reads
    discount: float  # per tick
    value_range: tuple[float, float] | None = None  # of returns, which the critic is bounded by; None: it is not
    prefix_steps: int = 0  # actions the prefix critic scores, those that are executed; 0 where there is none
    grippers: tuple[int, ...] = ()  # action dimensions that are grippers
    gripper_inputs: int = 0  # numbers of a discrete gripper's choice that the critic sees
    bounded: bool = True  # model space is [-1, 1] in every number of an action
    micro_batches: int = 1  # that gradients are summed over
    policy_batch: int | None = None  # windows of the policy's own batch; None: it has the critic's last one
    executed: int = 1  # actions of a chunk
    group: GroupConfig = dataclasses.field(default_factory=GroupConfig)  # of agents that iterate

    @property
    def compared_steps(self) -> int:
        """Actions by which a decision's candidates are compared: the prefix critic's, or the critic's."""
        return self.prefix_steps or self.critic_steps


def agent_spec(config: ExperimentConfig, spec: RobotSpec) -> AgentSpec:
    """The sizes for this experiment on this robot. Raises ConfigError for a camera that the robot lacks."""
    return AgentSpec(
        spec.state_dim,
        spec.action_dim,
        config.chunk.horizon,
        config.chunk.critic_steps,
        shown(map(spec.camera, config.agent.image_keys), config.agent.encoder.frame_size),
        config.discount,
        config.value_range,
        config.chunk.executed if config.agent.prefix_critic else 0,
        spec.grippers,
        policy_batch=config.learner.policy_batch_size,
        micro_batches=config.learner.accumulate,
        bounded=config.normaliser.bounded,
        executed=config.chunk.executed,
        group=config.group,
    )

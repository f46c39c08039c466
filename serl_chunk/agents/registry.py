"""From an experiment to its agent. Importing this module imports no JAX; building an agent does."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import TYPE_CHECKING

from serl_chunk.config.agents import AcfqlConfig, AcrlpdConfig, AgentConfig, BcConfig
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.types import CameraSpec, ConfigError, RobotSpec

if TYPE_CHECKING:
    from serl_chunk.agents.base import Agent

# configuration class -> (module, class) of its implementation
IMPLEMENTATIONS: dict[type[AgentConfig], tuple[str, str]] = {
    AcfqlConfig: ("serl_chunk.agents.acfql", "Acfql"),
    AcrlpdConfig: ("serl_chunk.agents.acrlpd", "Acrlpd"),
    BcConfig: ("serl_chunk.agents.bc", "Bc"),
}


GRIPPER = "gripper"  # entry of an observation: what a discrete gripper does during the chunk, as a critic's input


@dataclasses.dataclass(frozen=True)
class AgentSpec:
    """The sizes an agent is built for."""

    state_dim: int
    action_dim: int
    horizon: int  # H of the policy
    critic_steps: int  # actions the critic scores; more than horizon beside a prefix critic only
    cameras: tuple[CameraSpec, ...]
    discount: float  # per tick
    prefix_steps: int = 0  # actions the prefix critic scores, those that are executed; 0 where there is none
    grippers: tuple[int, ...] = ()  # action dimensions that are grippers
    gripper_inputs: int = 0  # numbers of a discrete gripper's choice that the critic sees

    @property
    def compared_steps(self) -> int:
        """Actions by which a decision's candidates are compared: the prefix critic's, or the critic's."""
        return self.prefix_steps or self.critic_steps


def agent_spec(config: ExperimentConfig, spec: RobotSpec) -> AgentSpec:
    """The sizes for this experiment on this robot; raises ConfigError for a camera the robot lacks."""
    return AgentSpec(
        spec.state_dim,
        spec.action_dim,
        config.chunk.horizon,
        config.chunk.critic_steps,
        tuple(spec.camera(k) for k in config.agent.image_keys),
        config.discount,
        config.chunk.executed if config.agent.prefix_critic else 0,
        spec.grippers,
    )


def make_agent(config: ExperimentConfig, spec: RobotSpec) -> Agent:
    """The agent that `config.agent` describes, for this robot. Raises ConfigError for an unknown class, and
    where `agent.gripper` does not fit the robot."""
    try:
        module, name = IMPLEMENTATIONS[type(config.agent)]
    except KeyError:
        valid = ", ".join(c.__name__ for c in IMPLEMENTATIONS)
        raise ConfigError(f"no agent implements {type(config.agent).__name__}; valid: {valid}") from None
    build = functools.partial(getattr(importlib.import_module(module), name), config.agent)
    sizes = agent_spec(config, spec)
    if config.agent.gripper.composition == "continuous":
        return build(sizes)
    from serl_chunk.agents.gripper import with_gripper

    return with_gripper(config.agent, sizes, build)

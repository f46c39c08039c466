"""Builds the agent of an experiment. Importing this module imports no JAX; building an agent does."""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from serl_chunk.agents.spec import agent_spec
from serl_chunk.config.agents.acfql import AcfqlConfig, DecoupledConfig
from serl_chunk.config.agents.acrlpd import AcrlpdConfig
from serl_chunk.config.agents.base import AgentConfig
from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.agents.groups import GroupAgentConfig
from serl_chunk.config.agents.published_qc import PublishedQcConfig
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.types import ConfigError, RobotSpec

if TYPE_CHECKING:
    from serl_chunk.agents.base import Agent

_TRAINER = "serl_chunk.learner.trainers.phases:PhaseTrainer"


class Implementation(NamedTuple):
    """What implements a configuration: callables, or texts `module:name` that are imported on use."""

    agent: Callable[..., Agent] | str  # (configuration, AgentSpec) -> agent
    trainer: Callable[..., Any] | str = _TRAINER  # as `learner.trainers.base.Trainer` is built


IMPLEMENTATIONS: dict[type[AgentConfig], Implementation] = {
    AcfqlConfig: Implementation("serl_chunk.agents.small_actors:acfql"),
    DecoupledConfig: Implementation("serl_chunk.agents.small_actors:acfql"),
    AcrlpdConfig: Implementation("serl_chunk.agents.acrlpd:Acrlpd"),
    BcConfig: Implementation("serl_chunk.agents.bc:Bc"),
    GroupAgentConfig: Implementation(
        "serl_chunk.agents.groups.agent:GroupAgent", "serl_chunk.learner.trainers.iterations:IterationTrainer"
    ),
    PublishedQcConfig: Implementation("serl_chunk.agents.published_qc:published_qc"),
}
_OURS = {config.kind for config in IMPLEMENTATIONS}


def register_agent(
    config: type[AgentConfig], agent: Callable[..., Agent], trainer: Callable[..., Any] | None = None
) -> None:
    """Let experiments have agents, and learners trainers, from outside this package; docs/algorithms.md has one.

    Args:
        config: a frozen dataclass with a `kind` of its own, which names it in run folders and in the handshake.
        agent: builds the agent from such a configuration and an AgentSpec.
        trainer: a `Trainer`; None: the phases that every agent of ours is trained in.

    Raises ConfigError for a class without a `kind`, or with one of ours.
    """
    if not config.kind or config.kind in _OURS:
        taken = f"{', '.join(sorted(_OURS))} are taken"
        raise ConfigError(f"{config.__name__}.kind is {config.kind!r}. Give it a name of its own; {taken}")
    IMPLEMENTATIONS[config] = Implementation(agent, trainer or _TRAINER)


def make_agent(config: ExperimentConfig, spec: RobotSpec) -> Agent:
    """Build the agent of `config.agent`. Raises ConfigError for an unknown class or an unfit `agent.gripper`."""
    build = functools.partial(builder_of(config.agent), config.agent)
    sizes = agent_spec(config, spec)
    if config.agent.gripper.composition == "continuous":
        return build(sizes)
    from serl_chunk.agents.discrete_gripper import with_gripper

    return with_gripper(config.agent, sizes, build)


def builder_of(config: AgentConfig) -> Callable[..., Agent]:
    """What makes this agent's arm, of a configuration and an AgentSpec."""
    return _implementation(config, "agent")


def trainer_of(config: AgentConfig) -> Callable[..., Any]:
    """What trains this agent: see `learner.trainers.base.Trainer`."""
    return _implementation(config, "trainer")


def _implementation(config: AgentConfig, part: str) -> Callable[..., Any]:
    try:
        found = getattr(IMPLEMENTATIONS[type(config)], part)
    except KeyError:
        valid = ", ".join(c.__name__ for c in IMPLEMENTATIONS)
        remedy = "Give it to serl_chunk.register_agent where it is defined"
        raise ConfigError(f"no agent implements {type(config).__name__}; valid: {valid}. {remedy}") from None
    return pkgutil.resolve_name(found) if isinstance(found, str) else found

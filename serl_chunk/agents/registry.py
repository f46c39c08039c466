"""Builds the agent of an experiment. Importing this module imports no JAX; building an agent does."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING

from serl_chunk.agents.spec import agent_spec
from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.config.agents.acrlpd import AcrlpdConfig
from serl_chunk.config.agents.base import AgentConfig
from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.agents.decoupled import DecoupledConfig
from serl_chunk.config.agents.published_qc import PublishedQcConfig
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.types import ConfigError, RobotSpec

if TYPE_CHECKING:
    from serl_chunk.agents.base import Agent

# configuration -> module and class of its implementation
IMPLEMENTATIONS: dict[type[AgentConfig], tuple[str, str]] = {
    AcfqlConfig: ("serl_chunk.agents.acfql", "Acfql"),
    DecoupledConfig: ("serl_chunk.agents.acfql", "Acfql"),
    AcrlpdConfig: ("serl_chunk.agents.acrlpd", "Acrlpd"),
    BcConfig: ("serl_chunk.agents.bc", "Bc"),
    PublishedQcConfig: ("serl_chunk.agents.published_qc", "published_qc"),
}


def make_agent(config: ExperimentConfig, spec: RobotSpec) -> Agent:
    """Build the agent of `config.agent`. Raises ConfigError for an unknown class or an unfit `agent.gripper`."""
    try:
        module, name = IMPLEMENTATIONS[type(config.agent)]
    except KeyError:
        valid = ", ".join(c.__name__ for c in IMPLEMENTATIONS)
        raise ConfigError(f"no agent implements {type(config.agent).__name__}; valid: {valid}") from None
    build = functools.partial(getattr(importlib.import_module(module), name), config.agent)
    sizes = agent_spec(config, spec)
    if config.agent.gripper.composition == "continuous":
        return build(sizes)
    from serl_chunk.agents.discrete_gripper import with_gripper

    return with_gripper(config.agent, sizes, build)

"""From a configuration to its agent."""

from __future__ import annotations

import dataclasses

import pytest
from errors import naming

from serl_chunk.agents.registry import IMPLEMENTATIONS, make_agent
from serl_chunk.agents.spec import agent_spec
from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.config.agents.base import ActorCriticConfig, AgentConfig
from serl_chunk.config.agents.decoupled import DecoupledConfig
from serl_chunk.config.agents.encoder import EncoderConfig
from serl_chunk.config.experiment import ChunkConfig, ExperimentConfig
from serl_chunk.config.robots import FakeAlohaConfig
from serl_chunk.robots.registry import robot_spec
from serl_chunk.types import CameraSpec, ConfigError

CONFIG = ExperimentConfig(name="x", robot=FakeAlohaConfig(), chunk=ChunkConfig(6, critic_horizon=4))
ROBOT = robot_spec(CONFIG.robot)


@dataclasses.dataclass(frozen=True)
class Unheard(AgentConfig):
    """No agent implements this."""


@pytest.mark.parametrize("cls", list(IMPLEMENTATIONS), ids=lambda c: c.kind)
def test_every_configuration_has_an_implementation_of_its_name(cls):
    chunk = ChunkConfig(6, critic_horizon=9 if cls().prefix_critic else 4)
    agent = make_agent(dataclasses.replace(CONFIG, agent=cls(), chunk=chunk), ROBOT)
    # Of the published two, the one of its default.
    name = {"published_qc": "publishedacfql", "decoupled": "acfql"}.get(cls.kind, cls.kind)
    assert type(agent).__name__.lower() == name
    assert agent.config == cls()


def test_every_agent_configuration_is_registered():
    found = [AgentConfig]
    for cls in found:
        found += cls.__subclasses__()
    assert set(IMPLEMENTATIONS) == set(found) - {AgentConfig, ActorCriticConfig, Unheard}


def test_sizes_come_from_robot_and_experiment():
    config = dataclasses.replace(CONFIG, agent=AcfqlConfig(image_keys=(ROBOT.cameras[1].name,)))
    spec = agent_spec(config, ROBOT)
    assert (spec.state_dim, spec.action_dim) == (ROBOT.state_dim, ROBOT.action_dim)
    assert (spec.horizon, spec.critic_steps, spec.discount) == (6, 4, config.discount)
    assert spec.cameras == (ROBOT.cameras[1],)
    scaled = dataclasses.replace(config.agent, encoder=EncoderConfig(frame_size=(24, 32)))
    spec = agent_spec(dataclasses.replace(config, agent=scaled), ROBOT)
    assert spec.cameras == (CameraSpec(ROBOT.cameras[1].name, 24, 32),)
    assert spec.prefix_steps == 0
    chunk = ChunkConfig(6, critic_horizon=9, execute_steps=4)
    spec = agent_spec(dataclasses.replace(CONFIG, agent=DecoupledConfig(), chunk=chunk), ROBOT)
    assert (spec.horizon, spec.critic_steps, spec.prefix_steps) == (6, 9, 4)


def test_what_cannot_be_built_is_refused_with_the_valid_names():
    with pytest.raises(ConfigError, match=naming("Unheard", "AcfqlConfig", "AcrlpdConfig", "BcConfig")):
        make_agent(dataclasses.replace(CONFIG, agent=Unheard()), ROBOT)
    blind = dataclasses.replace(CONFIG, agent=AcfqlConfig(image_keys=("roof",)))
    with pytest.raises(ConfigError, match=naming("fake_aloha", "roof", ROBOT.cameras[0].name)):
        make_agent(blind, ROBOT)

"""The bounds of model space are the normaliser's; policies and grippers that need them refuse a space without."""

from __future__ import annotations

import dataclasses
import typing

import pytest
from errors import naming

from serl_chunk.agents.spec import agent_spec
from serl_chunk.cli.process import load, spec_of
from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.config.agents.acrlpd import AcrlpdConfig
from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.agents.gripper import GripperConfig
from serl_chunk.config.experiment import UNBOUNDED, NormaliserConfig
from serl_chunk.config.fields import check_unused
from serl_chunk.config.overrides import apply_overrides
from serl_chunk.types import ConfigError

CONFIG = load("fake_aloha", [])
OPENPI = NormaliserConfig("openpi", norm_stats="norm_stats.json")
MODES = typing.get_args(typing.get_type_hints(NormaliserConfig)["actions"])


def with_agent(agent, normaliser=OPENPI):
    return dataclasses.replace(CONFIG, agent=agent, normaliser=normaliser)


@pytest.mark.parametrize("mode", MODES)
def test_an_agent_is_built_for_the_bounds_of_the_mode(mode):
    config = with_agent(AcfqlConfig(), NormaliserConfig(mode, norm_stats="norm_stats.json"))
    assert config.normaliser.bounded is agent_spec(config, spec_of(CONFIG)).bounded is (mode not in UNBOUNDED)
    assert UNBOUNDED == ("openpi",)


@pytest.mark.parametrize("agent", [AcrlpdConfig(), BcConfig(policy="gaussian")])
def test_a_tanh_refuses_a_space_without_bounds(agent):
    with pytest.raises(ConfigError, match=naming("openpi", agent.kind, "acfql", "agent.policy=flow")) as refused:
        with_agent(agent)
    assert refused.value.parameter == "normaliser.actions"
    with_agent(agent, NormaliserConfig("relative"))
    with_agent(BcConfig(policy="flow"))


def test_values_of_grippers_refuse_a_space_without_bounds():
    for gripper in (GripperConfig(choices=(-1.0, 1.0)), GripperConfig(mode="fixed", fixed_value=0.5)):
        with pytest.raises(ConfigError, match=naming("openpi", "agent.gripper")) as refused:
            with_agent(AcfqlConfig(gripper=gripper))
        assert refused.value.parameter == "normaliser.actions"
        with_agent(AcfqlConfig(gripper=gripper), NormaliserConfig("relative"))
    with_agent(AcfqlConfig(gripper=GripperConfig(mode="fixed")))  # the actor keeps it, in the robot's units


def test_the_bins_of_pi05_need_quantiles():
    pi05 = [("agent.policy", "pi0"), ("agent.pi0.pi05", "True"), ("agent.language.tokenizer", "bytes")]
    openpi = [("normaliser.actions", "openpi"), ("normaliser.norm_stats", "x.json")]
    clone = dataclasses.replace(CONFIG, agent=BcConfig())
    with pytest.raises(ConfigError, match=naming("normaliser.scaling", "quantiles", "z_score")):
        apply_overrides(clone, [*pi05, *openpi])
    apply_overrides(clone, [*pi05, *openpi, ("normaliser.scaling", "quantiles")])
    apply_overrides(clone, [*pi05, *openpi, ("agent.pi0.state_in_prompt", "False")])


def test_settings_of_openpis_transforms_need_its_mode():
    for path, text in (("scaling", "quantiles"), ("delta_mask", "6,-1,6,-1"), ("robot", "aloha")):
        given = (f"normaliser.{path}", text)
        with pytest.raises(ConfigError, match=naming(*given, "normaliser.actions=openpi")):
            check_unused(load("fake_aloha", [given]), [given[0]])
        file = [("normaliser.actions", "openpi"), ("normaliser.norm_stats", "x.json")]
        config = load("fake_aloha", [*file, given])
        check_unused(config, [given[0]])
    assert load("fake_aloha", [*file, ("normaliser.delta_mask", "6,-1,6,-1")]).normaliser.delta_mask == (6, -1, 6, -1)

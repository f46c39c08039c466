"""Every setting says what it means, and its range is checked."""

from __future__ import annotations

import dataclasses
import math

import pytest
from errors import naming

from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.config.agents.acrlpd import AcrlpdConfig
from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.agents.published_qc import PublishedQcConfig
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.fields import ABSENT, Group, acting, leaves, needs, setting, settings_of, value_at
from serl_chunk.config.robots import (
    AlohaConfig,
    AlohaSimConfig,
    FakeAlohaConfig,
    FakeSingleArmConfig,
    FrankaConfig,
    GymConfig,
    OgbenchConfig,
    RobomimicConfig,
)
from serl_chunk.types import ConfigError

ROBOTS = (
    AlohaConfig,
    AlohaSimConfig,
    FakeAlohaConfig,
    FakeSingleArmConfig,
    FrankaConfig,
    GymConfig,
    OgbenchConfig,
    RobomimicConfig,
)


def groups(group: type) -> set[type]:
    """`group` and the groups that its fields hold by default."""
    found = {group}
    for field in dataclasses.fields(group):
        if field.default_factory is not dataclasses.MISSING:
            found |= groups(type(field.default_factory()))
    return found


def test_every_setting_of_every_group_has_a_line_of_help():
    every = set().union(*(groups(c) for c in (ExperimentConfig, AcfqlConfig, AcrlpdConfig, BcConfig, *ROBOTS)))
    assert len(every) > 20
    for group in every:
        for name, (meaning, _) in settings_of(group).items():
            assert meaning.help, f"{group.__name__}.{name}"
            assert "\n" not in meaning.help


def test_requirements_name_settings_that_there_are():
    """A misspelt one would always be met."""
    agents = (AcfqlConfig(), AcrlpdConfig(), BcConfig())
    configs = [ExperimentConfig("x", FakeAlohaConfig(), agent=agent) for agent in agents]
    for leaf in (leaf for config in configs for leaf in leaves(config)):
        for requirement in leaf.requires:
            path = requirement.needs.partition("=")[0]
            if "=" in requirement.needs:
                assert any(value_at(config, path) is not ABSENT for config in configs), requirement.needs


@dataclasses.dataclass(frozen=True)
class Sizes(Group, path="sizes."):
    """A group of every kind of range."""

    width: int = setting(4, "of something", least=1, most=8)
    share: float = acting(0.5, "of it", above=0, below=1)
    pair: tuple[int, ...] = setting((1, 2), "numbers", items=1, least=0)
    wait: float = setting(1.0, "seconds", unit="s", above=0)
    note: str = setting("", "free text")


@dataclasses.dataclass(frozen=True)
class Wide(Sizes):
    """Another default keeps the meaning."""

    width: int = 8


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"width": 0}, ("sizes.width", "[1, 8]", 0)),
        ({"width": 9}, ("sizes.width", "[1, 8]", 9)),
        ({"share": 0.0}, ("sizes.share", "(0, 1)", 0.0)),
        ({"share": math.nan}, ("sizes.share", "(0, 1)", "nan")),
        ({"pair": ()}, ("sizes.pair", 1, "()")),
        ({"pair": (3, -1)}, ("sizes.pair", "at least 0", "(3, -1)")),
        ({"wait": -math.inf}, ("sizes.wait", "above 0", "-inf")),
    ],
)
def test_a_value_outside_its_range_is_refused(values, named):
    for group in (Sizes, Wide):
        with pytest.raises(ConfigError, match=naming(*named)) as refused:
            group(**values)
        assert refused.value.parameter == named[0]


def test_values_inside_their_range_pass():
    assert Sizes(width=8, share=0.1, pair=(0,), wait=math.inf).wait == math.inf
    assert settings_of(Wide)["width"][0].help == "of something"
    assert settings_of(Wide)["share"][0].acts == "value"


def test_leaves_know_what_is_usual():
    config = ExperimentConfig("x", FakeAlohaConfig(), agent=AcfqlConfig(lr=1.0))
    changed = {leaf.path for leaf in leaves(config) if leaf.value != leaf.default}
    assert changed == {"name", "agent.lr"}
    assert needs("agent.flow.train_delay", "none").met(config)
    assert not needs("agent.flow.train_delay", "sampled").met(config)


def test_our_agent_stays_small():
    """Every setting is one more for a user to get wrong; a new one takes the place of another."""
    acfql = [leaf.path for leaf in leaves(ExperimentConfig("x", FakeAlohaConfig())) if leaf.path.startswith("agent.")]
    assert len(acfql) <= 45, acfql


@pytest.mark.parametrize(
    ("agent", "noise"),
    [
        (AcfqlConfig(), 0.4),
        (AcfqlConfig(bc_joint_noise=0.0), 0.0),
        (AcfqlConfig(image_keys=("top",)), 0.0),
        (AcfqlConfig(image_keys=("top",), bc_joint_noise=0.2), 0.2),
        (BcConfig(), 0.4),
        (BcConfig(policy="gaussian"), 0.0),
        (AcrlpdConfig(), 0.0),
        (AcrlpdConfig(bc_joint_noise=0.1), 0.1),
        (PublishedQcConfig(), 0.0),
    ],
)
def test_flows_without_cameras_imitate_with_moved_joints_unless_told_otherwise(agent, noise):
    assert agent.joint_noise == noise

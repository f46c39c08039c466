"""Every setting says what it means, and its range is checked."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from typing import Any

import pytest
from errors import naming

from serl_chunk.config import robots
from serl_chunk.config.agents.acfql import AcfqlConfig, DecoupledConfig
from serl_chunk.config.agents.acrlpd import AcrlpdConfig
from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.agents.gripper import SacGripperConfig
from serl_chunk.config.agents.groups import GroupAgentConfig
from serl_chunk.config.agents.published_qc import PublishedQcConfig
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.fields import ABSENT, Group, acting, leaves, setting, settings_of, value_at
from serl_chunk.config.robots import FakeAlohaConfig, GymConfig
from serl_chunk.types import ConfigError

ROBOTS = (robots.AlohaConfig, robots.AlohaSimConfig, FakeAlohaConfig, robots.FakeSingleArmConfig, robots.FrankaConfig,
          GymConfig, robots.LiberoConfig, robots.OgbenchConfig, robots.RobomimicConfig)  # fmt: skip
AGENTS = (AcfqlConfig, AcrlpdConfig, BcConfig, DecoupledConfig, PublishedQcConfig)
NEEDED: dict[type, dict[str, Any]] = {
    ExperimentConfig: {"name": "x", "robot": FakeAlohaConfig()},
    GymConfig: {"make": print},
}
WITHOUT_A_RANGE = {  # of numbers: any value, or one that other settings bound (test_refused.py)
    "agent.gripper.neutral", "agent.target_entropy_multiplier", "agent.target_entropy_per_dim", "chunk.execute_steps",
    "chunk.return_steps", "device.scale", "learner.max_lag_steps", "normaliser.delta_mask", "reward.failure_reward",
    "reward.offset", "reward.scale", "robot.box_high", "robot.box_low", "robot.grippers", "robot.joint_of_action",
}  # fmt: skip


def groups(group: type) -> set[type]:
    found = {group}
    for field in dataclasses.fields(group):
        if field.default_factory is not dataclasses.MISSING:
            found |= groups(type(field.default_factory()))
    return found


def types_in(hint: Any) -> set[Any]:
    origin = typing.get_origin(hint)
    inner = typing.get_args(hint) if origin in (tuple, types.UnionType, typing.Union) else ()
    return {origin or hint}.union(*map(types_in, inner))


EVERY = sorted(
    set().union(*map(groups, (ExperimentConfig, SacGripperConfig, *AGENTS, *ROBOTS))), key=lambda g: g.__name__
)


def test_every_setting_has_a_line_of_help():
    assert len(EVERY) > 20
    for group in EVERY:
        for name, (meaning, _) in settings_of(group).items():
            assert meaning.help, f"{group.__name__}.{name}"
            assert "\n" not in meaning.help


@pytest.mark.parametrize("group", EVERY, ids=lambda g: g.__name__)
def test_every_number_has_a_range_and_every_choice_its_values(group):
    for name, (meaning, hint) in settings_of(group).items():
        path, kinds = group.PATH + name, types_in(hint)
        beyond = ((meaning.least, -1), (meaning.above, 0), (meaning.most, 1), (meaning.below, 0))
        wrong: list[Any] = [edge + by for edge, by in beyond if edge is not None]
        if tuple in kinds:
            wrong = [(v,) for v in wrong] + [()] * (meaning.items > 0)
        assert wrong or path in WITHOUT_A_RANGE or not kinds & {int, float}, path
        for value in [*wrong, *(["no_such"] if typing.Literal in kinds else [])]:
            with pytest.raises(ConfigError, match=naming(f"got {value!r}")) as refused:
                group(**NEEDED.get(group, {}) | {name: value})
            assert refused.value.parameter == path


def test_requirements_name_settings_that_there_are():
    """A misspelt one would always be met."""
    agents = (AcfqlConfig, AcrlpdConfig, BcConfig, GroupAgentConfig)
    configs = [ExperimentConfig("x", FakeAlohaConfig(), agent=agent()) for agent in agents]
    for leaf in (leaf for config in configs for leaf in leaves(config)):
        for requirement in leaf.requires:
            path = requirement.needs.partition("=")[0]
            if "=" in requirement.needs:
                assert any(value_at(config, path) is not ABSENT for config in configs), requirement.needs


@dataclasses.dataclass(frozen=True)
class Sizes(Group, path="sizes."):
    width: int = setting(4, "of something", least=1, most=8)
    share: float = acting(0.5, "of it", above=0, below=1)
    pair: tuple[int, ...] = setting((1, 2), "numbers", items=1, least=0)
    wait: float = setting(1.0, "seconds", unit="s", above=0)
    note: str = setting("", "free text")


@dataclasses.dataclass(frozen=True)
class Wide(Sizes):
    width: int = 8


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"width": 0}, ("sizes.width", "[1, 8]", 0)),
        ({"share": 0.0}, ("sizes.share", "(0, 1)", 0.0)),
        ({"share": math.nan}, ("sizes.share", "(0, 1)", "nan")),
        ({"pair": ()}, ("sizes.pair", 1, "()")),
        ({"pair": (3, -1)}, ("sizes.pair", "at least 0", "(3, -1)")),
    ],
)
def test_a_value_outside_its_range_is_refused(values, named):
    for group in (Sizes, Wide):
        with pytest.raises(ConfigError, match=naming(*named)) as refused:
            group(**values)
        assert refused.value.parameter == named[0]


def test_values_inside_their_range_pass():
    assert Sizes(width=8, share=0.1, pair=(0,), wait=math.inf).wait == math.inf
    assert (settings_of(Wide)["width"][0].help, settings_of(Wide)["share"][0].acts) == ("of something", "value")

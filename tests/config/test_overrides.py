"""Typed overrides: what each annotation accepts, what the refusals say, and the difference of two configurations."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Literal

import pytest
from errors import naming

from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.config.agents.acrlpd import AcrlpdConfig
from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.agents.critic import SacCriticConfig
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.overrides import apply_overrides, difference, parse, to_dict
from serl_chunk.config.robots import FakeAlohaConfig, GymConfig
from serl_chunk.types import ConfigError

BASE = ExperimentConfig(name="base", robot=FakeAlohaConfig())


def test_nested_values_of_every_type():
    config = apply_overrides(
        BASE,
        [
            ("agent.lr", "1e-4"),
            ("agent.critic.hidden", "(32, 64)"),
            ("agent.image_keys", "top"),
            ("agent.use_state", "off"),
            ("chunk.critic_horizon", "3"),
            ("learner.max_steps", "1e6"),
            ("replay.demo_fraction", "uniform"),
            ("robot.task", "1"),
            ("seed", "7"),
        ],
    )
    assert (config.agent.lr, config.agent.critic.hidden, config.agent.image_keys) == (1e-4, (32, 64), ("top",))
    assert (config.agent.use_state, config.chunk.critic_horizon, config.robot.task) == (False, 3, "1")
    assert config.learner.max_steps == 1_000_000
    assert isinstance(config.learner.max_steps, int)
    assert (config.replay.demo_fraction, config.seed) == ("uniform", 7)
    assert isinstance(config.agent, AcfqlConfig)
    assert ExperimentConfig(name="base", robot=FakeAlohaConfig()) == BASE  # the original is untouched


def test_nothing_to_override_gives_the_same_object():
    assert apply_overrides(BASE, []) is BASE


def test_fields_that_must_agree_can_be_changed_together():
    base = dataclasses.replace(BASE, agent=AcrlpdConfig(critic=SacCriticConfig(ensemble=4)))
    config = apply_overrides(base, [("agent.critic.target_subset", "9"), ("agent.critic.ensemble", "9")])
    assert config.agent.critic.target_subset == 9
    with pytest.raises(ConfigError, match=naming("agent.critic.target_subset", 9, "1..4")):
        apply_overrides(base, [("agent.critic.target_subset", "9")])


def test_the_last_of_two_values_wins():
    assert apply_overrides(BASE, [("seed", "1"), ("seed", "2")]).seed == 2


def test_none_and_numbers_of_an_optional_field():
    changed = apply_overrides(BASE, [("chunk.critic_horizon", "2")])
    assert apply_overrides(changed, [("chunk.critic_horizon", "none")]).chunk.critic_horizon is None
    assert apply_overrides(BASE, [("replay.demo_fraction", "0.25")]).replay.demo_fraction == 0.25


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ([("agnet.lr", "1")], ("agnet", "'agent'", "name", "robot")),
        ([("agent.critic.tua", "1")], ("agent.critic.tua", "'tau'")),
        ([("agent.zzzz", "1")], ("agent.zzzz", "lr", "bc_on")),
        ([("", "1")], ("name", "robot")),
        ([("seed.x", "1")], ("seed", 42)),
        ([("agent", "1")], ("agent", "lr", "bc_on")),
        ([("agent.lr", "1"), ("agent", "2")], ("agent", "lr", "bc_on")),
        ([("agent", "2"), ("agent.lr", "1")], ("agent.lr", "'agent'")),
        ([("seed", "2"), ("seed.x", "1")], ("seed.x", "'seed'")),
        ([("seed", "many")], ("seed", "many")),
        ([("seed", "1.5")], ("seed", 1.5)),
        ([("seed", "inf")], ("seed", "inf")),
        ([("discount", "high")], ("discount", "high")),
        ([("agent.use_state", "maybe")], ("agent.use_state", "maybe", "true", "false")),
        (
            [("agent.gripper.setup_mode", "single-arm-fixed")],
            (
                "agent.gripper.setup_mode",
                "'single-arm-fixed'",
                "'single-arm-fixed-gripper'",
                "dual-arm-learned-gripper",
            ),
        ),
        ([("agent.gripper.mode", "l1")], ("agent.gripper.mode", "l1", "learned", "fixed")),
        ([("agent.critic.hidden", "64,x")], ("agent.critic.hidden", "x")),
        ([("chunk.critic_horizon", "x")], ("chunk.critic_horizon", "x", "none")),
        ([("replay.demo_fraction", "x")], ("replay.demo_fraction", "x", "uniform")),
        ([("agent.lr", "-1")], ("agent.lr", -1.0)),
    ],
)
def test_refusals_name_the_path_and_what_is_valid(overrides, named):
    with pytest.raises(ConfigError, match=naming(*named)):
        apply_overrides(BASE, overrides)


def test_a_function_cannot_come_from_the_command_line():
    gym = ExperimentConfig(name="gym", robot=GymConfig(make=lambda fake_env: None))
    with pytest.raises(ConfigError, match=naming("robot.make", "os:system")):
        apply_overrides(gym, [("robot.make", "os:system")])


def test_parse_covers_bools_literals_and_empty_tuples():
    assert [parse(t, bool, "x") for t in ("True", "1", "yes", "no", "0")] == [True, True, True, False, False]
    assert parse("2", Literal[1, 2], "x") == 2
    assert parse("()", tuple[str, ...], "x") == ()
    assert parse("['a', \"b\"]", tuple[str, ...], "x") == ("a", "b")
    assert parse("24,32", tuple[int, int], "x") == (24, 32)
    with pytest.raises(ConfigError, match=naming("24", 2)) as caught:
        parse("24", tuple[int, int], "x")
    assert caught.value.parameter == "x"
    with pytest.raises(ConfigError, match=naming("x", 3, "none")):
        parse("3", type(None), "x")


def test_to_dict_is_plain_and_says_which_agent():
    config = ExperimentConfig(name="gym", robot=GymConfig(make=make), agent=BcConfig())
    out = to_dict(config)
    assert json.loads(json.dumps(out)) == out
    assert (out["agent"]["kind"], out["robot"]["kind"]) == ("bc", "gym")
    assert out["robot"]["make"] == f"{__name__}:make"
    assert out["agent"]["flow"]["hidden"] == [256, 256]


def test_difference_lists_every_changed_leaf():
    new = dataclasses.replace(BASE, seed=1, agent=dataclasses.replace(BASE.agent, lr=0.5))
    assert difference(to_dict(BASE), to_dict(new)) == ["agent.lr: 0.0003 -> 0.5", "seed: 42 -> 1"]
    assert difference(to_dict(BASE), to_dict(BASE)) == []
    assert difference({"a": 1}, {"b": 2}) == ["a: 1 -> None", "b: None -> 2"]


def test_a_callable_without_a_name_of_its_own_has_a_stable_text():
    class Maker:
        def __call__(self, fake_env: bool) -> None: ...

    text = lambda made: to_dict(GymConfig(make=made))["make"]  # noqa: E731
    assert text(functools.partial(make, fake_env=True)) == f"{__name__}:make"
    assert text(Maker()) == text(Maker())
    assert text(Maker()).endswith("Maker")


def make(fake_env: bool) -> None:
    """Something with a name."""

"""Typed overrides: what each annotation accepts, what the refusals say, and the difference of two configurations."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Literal

import pytest
from errors import naming

from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.fields import value_at
from serl_chunk.config.overrides import apply_overrides, difference, parse, to_dict
from serl_chunk.config.robots import FakeAlohaConfig, GymConfig
from serl_chunk.types import ConfigError

BASE = ExperimentConfig(name="base", robot=FakeAlohaConfig())


def make(fake_env: bool) -> None:
    """Something with a name."""


def test_nested_values_of_every_type():
    given = {
        "agent.lr": ("1e-4", 1e-4), "agent.critic.hidden": ("(32, 64)", (32, 64)), "seed": ("7", 7),
        "agent.image_keys": ("top", ("top",)), "agent.use_state": ("off", False), "chunk.critic_horizon": ("3", 3),
        "learner.max_steps": ("1e6", 1_000_000), "robot.task": ("1", "1"), "replay.demo_fraction": ("uniform",) * 2,
    }  # fmt: skip
    config = apply_overrides(BASE, [("seed", "2"), *((path, text) for path, (text, _) in given.items())])
    for path, (_, value) in given.items():  # the last of two values wins
        assert (value_at(config, path), type(value_at(config, path))) == (value, type(value)), path
    assert type(config.agent) is type(BASE.agent)
    assert ExperimentConfig(name="base", robot=FakeAlohaConfig()) == BASE  # the original is untouched
    assert apply_overrides(config, [("chunk.critic_horizon", "none")]).chunk.critic_horizon is None
    assert apply_overrides(BASE, [("replay.demo_fraction", "0.25")]).replay.demo_fraction == 0.25
    assert apply_overrides(BASE, []) is BASE


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ([("agnet.lr", "1")], ("agnet", "'agent'", "name", "robot")),
        ([("agent.critic.tua", "1")], ("agent.critic.tua", "'tau'")),
        ([("", "1")], ("name", "robot")),
        ([("seed.x", "1")], ("seed", 42)),
        ([("agent", "1")], ("agent", "lr", "bc_on")),
        ([("agent", "2"), ("agent.lr", "1")], ("agent.lr", "'agent'")),
        ([("seed", "2"), ("seed.x", "1")], ("seed.x", "'seed'")),
        ([("seed", "1.5")], ("seed", 1.5)),
        ([("agent.use_state", "maybe")], ("agent.use_state", "maybe", "true", "false")),
        ([("agent.gripper.setup_mode", "single-arm-fixed")],
         ("agent.gripper.setup_mode", "'single-arm-fixed'", "'single-arm-fixed-gripper'", "dual-arm-learned-gripper")),
        ([("chunk.critic_horizon", "x")], ("chunk.critic_horizon", "x", "none")),
        ([("agent.lr", "-1")], ("agent.lr", -1.0)),
        ([("robot.make", "os:system")], ("robot.make", "os:system")),  # no function comes from the command line
    ],
)  # fmt: skip
def test_refusals_name_the_path_and_what_is_valid(overrides, named):
    base = dataclasses.replace(BASE, robot=GymConfig(make=make)) if "robot.make" in named else BASE
    with pytest.raises(ConfigError, match=naming(*named)):
        apply_overrides(base, overrides)


def test_parse_covers_bools_literals_and_tuples():
    assert [parse(t, bool, "x") for t in ("True", "1", "yes", "no", "0")] == [True, True, True, False, False]
    assert parse("2", Literal[1, 2], "x") == 2
    texts = {"()": (), "['a', \"b\"]": ("a", "b")}
    assert {text: parse(text, tuple[str, ...], "x") for text in texts} == texts
    assert parse("24,32", tuple[int, int], "x") == (24, 32)
    for text, hint, named in (("24", tuple[int, int], ("24", 2)), ("3", type(None), (3, "none"))):
        with pytest.raises(ConfigError, match=naming("x", *named)) as caught:
            parse(text, hint, "x")
        assert caught.value.parameter == "x"


def test_a_configuration_is_written_as_plain_values_with_stable_names_of_functions():
    class Maker:
        def __call__(self, fake_env: bool) -> None: ...

    out = to_dict(ExperimentConfig(name="gym", robot=GymConfig(make=make), agent=BcConfig()))
    assert json.loads(json.dumps(out)) == out
    assert (out["agent"]["kind"], out["robot"]["kind"]) == ("bc", "gym")
    assert out["agent"]["flow"]["hidden"] == [256, 256]
    wrapped, one, other = (
        to_dict(GymConfig(make=made))["make"] for made in (functools.partial(make, fake_env=True), Maker(), Maker())
    )
    assert out["robot"]["make"] == wrapped == f"{__name__}:make"
    assert one == other
    assert one.endswith("Maker")


def test_difference_lists_every_changed_leaf():
    new = dataclasses.replace(BASE, seed=1, agent=dataclasses.replace(BASE.agent, lr=0.5))
    assert difference(to_dict(BASE), to_dict(new)) == ["agent.lr: 0.0003 -> 0.5", "seed: 42 -> 1"]
    assert difference(to_dict(BASE), to_dict(BASE)) == []
    assert difference({"a": 1}, {"b": 2}) == ["a: 1 -> None", "b: None -> 2"]

"""Settings of grippers: what they come to, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest
from errors import naming

from serl_chunk.cli.process import load, spec_of
from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.config.agents.acrlpd import AcrlpdConfig
from serl_chunk.config.agents.decoupled import DecoupledConfig
from serl_chunk.config.agents.gripper import HIL_SERL_CHOICES, GripperConfig, SacGripperConfig
from serl_chunk.config.compatibility import contract
from serl_chunk.config.experiment import ChunkConfig, ExperimentConfig
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.presets import configured
from serl_chunk.config.replay import ReplayConfig
from serl_chunk.config.robots import FakeAlohaConfig
from serl_chunk.types import ConfigError

TWO = (-1.0, 1.0)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"choices": (1.0,)}, ("agent.gripper.choices", "(1.0,)")),
        ({"choices": (1.0, 1.0)}, ("agent.gripper.choices", "(1.0, 1.0)")),
        ({"choices": (0.0, 1.5)}, ("agent.gripper.choices", "(0.0, 1.5)", "[-1, 1]")),
        ({"mode": "off"}, ("agent.gripper.mode", "off", "learned", "fixed")),
        ({"setup_mode": "single-arm"}, ("agent.gripper.setup_mode", "single-arm", "dual-arm-learned-gripper")),
        (
            {"mode": "fixed", "setup_mode": "dual-arm-learned-gripper"},
            ("agent.gripper.mode", "fixed", "agent.gripper.setup_mode", "dual-arm-learned-gripper"),
        ),
        ({"mode": "fixed", "choices": TWO}, ("agent.gripper.choices", "(-1.0, 1.0)", "agent.gripper.mode", "learned")),
        (
            {"setup_mode": "dual-arm-fixed-gripper", "choices": TWO},
            ("agent.gripper.choices", "(-1.0, 1.0)", "agent.gripper.mode", "learned"),
        ),
        ({"neutral": 0.0}, ("agent.gripper.neutral", 0.0, "agent.gripper.choices", "setup_mode")),
        (
            {"neutral": 0.0, "choices": TWO},
            ("agent.gripper.neutral", 0.0, "agent.gripper.choices", "(-1.0, 1.0)"),
        ),
        ({"fixed_value": 0.5}, ("agent.gripper.fixed_value", 0.5, "agent.gripper.mode", "fixed")),
        ({"mode": "fixed", "fixed_value": 2.0}, ("agent.gripper.fixed_value", 2.0, "[-1, 1]")),
        ({"hold_steps": 0}, ("agent.gripper.hold_steps", 0, 1)),
        ({"penalty": 0.1}, ("agent.gripper.penalty", 0.1, 0)),
        ({"epsilon": 1.1}, ("agent.gripper.epsilon", 1.1, "[0, 1]")),
        ({"mask_unreachable": -0.1}, ("agent.gripper.mask_unreachable", -0.1, "[0, 1]")),
        ({"penalty": -0.02}, ("agent.gripper.penalty", -0.02, "agent.gripper.choices", "setup_mode")),
        ({"mode": "fixed", "hold_steps": 3}, ("agent.gripper.hold_steps", 3, "agent.gripper.choices", "setup_mode")),
        ({"tau": 0.0}, ("agent.gripper.tau", 0.0, "(0, 1]")),
    ],
)
def test_a_value_that_cannot_work_is_named(values, named):
    with pytest.raises(ConfigError, match=naming(*named)):
        SacGripperConfig(**values)


def experiment(gripper: GripperConfig, **changes) -> ExperimentConfig:
    agent = AcfqlConfig(gripper=gripper)
    return ExperimentConfig("x", FakeAlohaConfig(), agent=agent, **{"chunk": ChunkConfig(6), **changes})


@pytest.mark.parametrize(
    ("gripper", "changes", "named"),
    [
        ({"hold_steps": 4}, {}, ("agent.gripper.hold_steps", 4, 6, "chunk.execute_steps")),
        (
            {},
            {"chunk": ChunkConfig(6, critic_horizon=3)},
            ("agent.gripper.choices", 6, "chunk.critic_horizon", 3, "chunk.execute_steps"),
        ),
        (
            {"penalty": -0.02},
            {"chunk": ChunkConfig(6, return_steps=9)},
            ("agent.gripper.penalty", "replay.windows", "episode", "chunk.return_steps"),
        ),
        (
            {"penalty": -0.02},
            {"replay": ReplayConfig(windows="qc", terminal_windows="drop")},
            ("agent.gripper.penalty", "replay.windows", "episode", "chunk.return_steps"),
        ),
    ],
)
def test_what_does_not_fit_the_experiment_is_named(gripper, changes, named):
    with pytest.raises(ConfigError, match=naming(*named)):
        experiment(GripperConfig(choices=TWO, **gripper), **changes)
    experiment(GripperConfig(choices=TWO, hold_steps=3, penalty=-0.02))


@pytest.mark.parametrize(
    ("chunk", "prefix"),
    [
        (ChunkConfig(6, critic_horizon=3, execute_steps=3), False),
        (ChunkConfig(6, execute_steps=3), True),
        (ChunkConfig(6, critic_horizon=12, execute_steps=3), True),
        (ChunkConfig(3, critic_horizon=12), True),
    ],
)
def test_choices_are_for_what_is_executed_of_a_chunk(chunk, prefix):
    agent = DecoupledConfig if prefix else AcfqlConfig
    make = lambda **held: ExperimentConfig(  # noqa: E731
        "x",
        FakeAlohaConfig(),
        chunk=chunk,
        agent=agent(gripper=GripperConfig(choices=TWO, penalty=-0.02, **held)),
    )
    make(hold_steps=1)
    make()
    with pytest.raises(ConfigError, match=naming("agent.gripper.hold_steps", 2, 3, "chunk.execute_steps")):
        make(hold_steps=2)


def test_what_the_settings_come_to():
    assert GripperConfig().composition == "continuous"
    assert GripperConfig(choices=TWO).composition == "learned"
    assert (GripperConfig(mode="fixed").composition, GripperConfig(mode="fixed").kept) == ("fixed", True)
    assert not GripperConfig(mode="fixed", fixed_value=0.0).kept
    dual = GripperConfig(setup_mode="dual-arm-learned-gripper")
    assert (dual.composition, dual.arms, dual.values) == ("learned", 2, HIL_SERL_CHOICES)
    single = GripperConfig(setup_mode="single-arm-fixed-gripper")
    assert (single.composition, single.arms, single.kept) == ("fixed", 1, True)
    assert GripperConfig(choices=TWO).reads_before
    assert not GripperConfig().reads_before


def test_presets_keep_the_grippers_and_published_conventions_do_not():
    config = load_experiment("fake_aloha_discrete_gripper")
    assert configured(config, preset="qc").agent.gripper == config.agent.gripper
    choices = config.agent.gripper.choices
    assert configured(config, preset="rlpd").agent.gripper == SacGripperConfig(choices=choices)
    sac = dataclasses.replace(config, agent=AcrlpdConfig(gripper=SacGripperConfig(choices=choices, epsilon=0.5)))
    assert configured(sac, preset="hil-serl").agent.gripper == sac.agent.gripper
    assert configured(sac, preset="hg-dagger").agent.gripper == config.agent.gripper
    for preset in ("qc", "rlpd-ac", "bc"):
        assert configured(config, preset=preset, compat="qc").agent.gripper == GripperConfig()


def test_the_example_differs_from_the_demo_in_its_grippers_alone():
    plain, discrete = load_experiment("fake_aloha"), load_experiment("fake_aloha_discrete_gripper")
    assert discrete.agent.gripper.composition == "learned"
    agent = dataclasses.replace(discrete.agent, gripper=GripperConfig())
    assert dataclasses.replace(discrete, name=plain.name, agent=agent) == plain


def test_both_sides_compare_what_grippers_are():
    said = {}
    for text in ("", "-1,1", "-1,0,1"):
        config = load("fake_aloha", [("agent.gripper.choices", text)])
        said[text] = contract(config, spec_of(config), "")["agent"]
    assert said[""] == "acfql"
    assert said["-1,1"] == "acfql, grippers jointly of (-1, 1) for 5 ticks"
    part = load("fake_aloha", [("agent.gripper.choices", "-1,1"), ("chunk.horizon", "8"), ("chunk.execute_steps", "4"),
                               ("chunk.critic_horizon", "4")])  # fmt: skip
    assert contract(part, spec_of(part), "")["agent"].endswith("for 4 ticks")
    fixed = load("fake_aloha", [("agent.gripper.setup_mode", "dual-arm-fixed-gripper")])
    assert contract(fixed, spec_of(fixed), "")["agent"] == "acfql, grippers fixed (as at reset)"
    assert len(set(said.values())) == 3


def test_a_fixed_gripper_that_is_to_learn_is_told_what_among():
    fixed = dataclasses.replace(load_experiment("fake_aloha"), agent=AcfqlConfig(gripper=GripperConfig(mode="fixed")))
    with pytest.raises(
        ConfigError, match=naming("agent.gripper.mode", "learned", "agent.gripper.choices", "setup_mode")
    ):
        configured(fixed, [("agent.gripper.mode", "learned")])
    chosen = configured(fixed, [("agent.gripper.mode", "learned"), ("agent.gripper.choices", "-1,1")])
    assert chosen.agent.gripper == GripperConfig(choices=TWO)

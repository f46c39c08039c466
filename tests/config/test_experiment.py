"""What the settings of an experiment come to."""

from __future__ import annotations

import dataclasses
import typing

import pytest

from serl_chunk.agents.spec import agent_spec
from serl_chunk.cli.process import load
from serl_chunk.config.agents.acfql import AcfqlConfig, DecoupledConfig
from serl_chunk.config.agents.acrlpd import AcrlpdConfig
from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.agents.gripper import HIL_SERL_CHOICES, GripperConfig
from serl_chunk.config.agents.pi0 import PI0_PRESETS, Pi0Config
from serl_chunk.config.agents.published_qc import PublishedQcConfig
from serl_chunk.config.experiment import UNBOUNDED, ActorConfig, ChunkConfig, NormaliserConfig, RewardConfig
from serl_chunk.config.experiment import ExperimentConfig as Experiment
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.presets import PI0_ROBOTS
from serl_chunk.config.robots import FakeAlohaConfig, GymConfig
from serl_chunk.outcomes.robot import spec_of

MODES = typing.get_args(typing.get_type_hints(NormaliserConfig)["actions"])


@pytest.mark.parametrize(
    ("reward", "low", "high"),
    [
        (RewardConfig(offset=-1.0, failure_reward=-100.0), -100.0, 0.0),
        (RewardConfig(offset=-0.1, failure_reward=-30.0), -30.0, 0.9),
        (RewardConfig(scale=2.0, failure_reward=-1.0), -1.0, 2.0),
        (RewardConfig(offset=0.5), 0.0, 50.0),
    ],
)
def test_the_range_of_a_critic_holds_every_return(reward, low, high):
    config = Experiment(name="x", robot=FakeAlohaConfig(), reward=reward, discount=0.99)
    assert config.value_range == pytest.approx((low, high))
    assert dataclasses.replace(config, agent=AcrlpdConfig()).value_range is None
    g = 0.99
    for k in (0, 1, 7, 500):  # nothing the settings can pay leaves the range
        waited = reward.offset * (1 - g**k) / (1 - g)
        for end in (reward.scale + reward.offset, reward.failure_reward):
            assert low - 1e-6 <= waited + g**k * end <= high + 1e-6, (k, end)


def test_lengths_of_chunks_and_limits_of_episodes():
    short = ChunkConfig(7, critic_horizon=3, execute_steps=4)
    assert (ChunkConfig(7).critic_steps, ChunkConfig(7).executed, short.critic_steps, short.executed) == (7, 7, 3, 4)
    for chunk, carried in ((ChunkConfig(5, 12), 12), (ChunkConfig(5, 4, execute_steps=2), 5)):
        config = Experiment(name="x", robot=FakeAlohaConfig(), agent=DecoupledConfig(), chunk=chunk)
        assert (config.chunk.carried, config.chunk.returned) == (carried, config.chunk.critic_steps)
    assert GymConfig(make=print, max_episode_steps=7).time_limit == 7
    assert GymConfig(make=print, max_episode_s=12.0, control_hz=15.0).time_limit == 180
    assert ActorConfig(max_human_ticks=9, max_episodes=3).without_human_limit() == ActorConfig(max_episodes=3)


def test_only_a_gym_robot_that_says_so_is_real():
    assert [r.real for r in (FakeAlohaConfig(), GymConfig(make=print), GymConfig(make=print, is_real=True))] == [
        False, False, True,
    ]  # fmt: skip


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
        (PublishedQcConfig(), 0.0),
    ],
)
def test_flows_without_cameras_imitate_with_moved_joints_unless_told_otherwise(agent, noise):
    assert agent.joint_noise == noise


def test_what_the_settings_of_grippers_come_to():
    choices = GripperConfig(choices=(-1.0, 1.0))
    assert (GripperConfig().composition, choices.composition) == ("continuous", "learned")
    assert (choices.reads_before, GripperConfig().reads_before) == (True, False)
    fixed = [GripperConfig(mode="fixed"), GripperConfig(mode="fixed", fixed_value=0.0)]
    assert [(g.composition, g.kept) for g in fixed] == [("fixed", True), ("fixed", False)]
    dual = GripperConfig(setup_mode="dual-arm-learned-gripper")
    assert (dual.composition, dual.arms, dual.values) == ("learned", 2, HIL_SERL_CHOICES)
    single = GripperConfig(setup_mode="single-arm-fixed-gripper")
    assert (single.composition, single.arms, single.kept) == ("fixed", 1, True)


def test_the_example_of_grippers_differs_from_the_demo_in_them_alone():
    plain, discrete = load_experiment("fake_aloha"), load_experiment("fake_aloha_discrete_gripper")
    assert discrete.agent.gripper.composition == "learned"
    agent = dataclasses.replace(discrete.agent, gripper=GripperConfig())
    assert dataclasses.replace(discrete, name=plain.name, agent=agent) == plain


@pytest.mark.parametrize("mode", MODES)
def test_an_agent_is_built_for_the_bounds_of_the_mode(mode):
    config = dataclasses.replace(load("fake_aloha", []), normaliser=NormaliserConfig(mode, norm_stats="stats.json"))
    assert config.normaliser.bounded is agent_spec(config, spec_of(config)).bounded is (mode not in UNBOUNDED)
    assert UNBOUNDED == ("openpi",)


def test_presets_of_pi0_are_the_released_models():
    released = PI0_PRESETS["pi0"]
    assert Pi0Config() == released
    assert (released.token_grid, released.camera_tokens) == ((16, 16), 256)
    assert dataclasses.replace(PI0_PRESETS["tiny"], image_size=(48, 30)).token_grid == (4, 2)
    assert PI0_PRESETS["pi05"] == dataclasses.replace(released, pi05=True)
    for name, ranks in (("pi0_lora", (16, 0)), ("pi0_lora_both", (16, 32))):
        config = PI0_PRESETS[name]
        assert (config.vlm.attention_rank, config.expert.attention_rank) == ranks
        assert (config.vlm.mlp_rank, config.expert.mlp_rank) == ranks
        assert (config.vlm.attention_alpha, config.expert.attention_alpha, config.trainable) == (16.0, 32.0, "lora")


@pytest.mark.parametrize("name", PI0_ROBOTS)
def test_a_robots_settings_fit_the_released_model(name):
    robot, model = PI0_ROBOTS[name], PI0_PRESETS["pi0"]
    assert len(robot.cameras) <= len(model.cameras)
    assert max(robot.state_dim, robot.action_dim) <= model.action_dim
    assert sum(map(abs, robot.delta_mask)) in (0, robot.action_dim)
    made = robot.normaliser("stats.json", pi05=True)
    assert (made.actions, made.norm_stats, made.scaling) == ("openpi", "stats.json", "quantiles")
    assert robot.normaliser("stats.json").scaling == "z_score"
    assert (made.robot == "aloha") == name.startswith("aloha")

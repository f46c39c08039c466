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
from serl_chunk.config.agents.published_qc import PublishedQcConfig
from serl_chunk.config.experiment import UNBOUNDED, ActorConfig, ChunkConfig, NormaliserConfig, RewardConfig
from serl_chunk.config.experiment import ExperimentConfig as Experiment
from serl_chunk.config.robots import FakeAlohaConfig, GymConfig
from serl_chunk.outcomes.robot import spec_of

MODES = typing.get_args(typing.get_type_hints(NormaliserConfig)["actions"])


@pytest.mark.parametrize(
    ("reward", "low", "high"),
    [
        (RewardConfig(offset=-1.0, failure_reward=-100.0), -100.0, 0.0),
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


@pytest.mark.parametrize(
    ("agent", "noise"),
    [
        (AcfqlConfig(), 0.4),
        (AcfqlConfig(bc_joint_noise=0.0), 0.0),
        (AcfqlConfig(image_keys=("top",)), 0.0),
        (BcConfig(), 0.4),
        (BcConfig(policy="gaussian"), 0.0),
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


@pytest.mark.parametrize("mode", MODES)
def test_an_agent_is_built_for_the_bounds_of_the_mode(mode):
    config = dataclasses.replace(load("fake_aloha", []), normaliser=NormaliserConfig(mode, norm_stats="stats.json"))
    assert config.normaliser.bounded is agent_spec(config, spec_of(config)).bounded is (mode not in UNBOUNDED)
    assert UNBOUNDED == ("openpi",)

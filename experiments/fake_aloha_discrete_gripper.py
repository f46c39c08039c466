"""The fake ALOHA task with grippers that close or open for a whole chunk, chosen by a grasp critic."""

from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.config.agents.gripper import GripperConfig
from serl_chunk.config.experiment import (
    ActorConfig,
    ChunkConfig,
    ExperimentConfig,
    LearnerConfig,
    NormaliserConfig,
    ReplayConfig,
)
from serl_chunk.config.robots import FakeAlohaConfig


def experiment() -> ExperimentConfig:
    """Everything but the grippers is experiments/fake_aloha.py's.

    The normaliser puts the demonstrations' closed and open at -0.9 and 0.9.
    """
    agent = AcfqlConfig(gripper=GripperConfig(choices=(-0.9, 0.9)))
    return ExperimentConfig(
        name="fake_aloha_discrete_gripper",
        robot=FakeAlohaConfig(),
        agent=agent,
        chunk=ChunkConfig(horizon=5),
        normaliser=NormaliserConfig(actions="relative"),
        replay=ReplayConfig(capacity=100_000, demo_capacity=20_000, human_capacity=20_000),
        learner=LearnerConfig(
            utd_ratio=0.25,
            max_steps=12_000,
            pretrain_steps=8_000,
            critic_pretrain_steps=0,
            warmup_episodes=16,
            steps_per_update=50,
            checkpoint_period=2_000,
        ),
        actor=ActorConfig(clock="lockstep", intervention="scripted"),
        discount=0.985,  # 0.985**120 = 0.16
    )

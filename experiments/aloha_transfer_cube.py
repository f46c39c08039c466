"""gym-aloha's TransferCube in MuJoCo: the right arm lifts a cube and hands it to the left arm."""

from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.config.agents.critic import CriticConfig
from serl_chunk.config.agents.flow import FlowConfig
from serl_chunk.config.experiment import (
    ActorConfig,
    ChunkConfig,
    ExperimentConfig,
    LearnerConfig,
    NormaliserConfig,
    ReplayConfig,
)
from serl_chunk.config.robots import AlohaSimConfig


def experiment() -> ExperimentConfig:
    """State observations (joints and cube pose); about a quarter of an hour on two CPU cores."""
    return ExperimentConfig(
        name="aloha_transfer_cube",
        robot=AlohaSimConfig(),
        agent=AcfqlConfig(
            critic=CriticConfig(ensemble=2),
            flow=FlowConfig(hidden=(256, 256)),
        ),
        chunk=ChunkConfig(horizon=10),
        normaliser=NormaliserConfig(actions="relative"),
        replay=ReplayConfig(capacity=300_000, demo_capacity=50_000, human_capacity=10_000),
        learner=LearnerConfig(
            utd_ratio=0.1,
            max_lag_steps=600,
            max_steps=30_000,
            pretrain_steps=12_000,
            warmup_episodes=20,
            steps_per_update=50,
            checkpoint_period=5_000,
        ),
        actor=ActorConfig(clock="lockstep"),
        discount=0.995,  # 0.995**300 = 0.22
    )

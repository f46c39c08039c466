"""A simulated single arm with HIL-SERL's actions, end-effector velocities at 10 Hz: pick a block up and place it.

serl-chunk record --exp_name fake_single_arm --policy scripted --n_demos 20 --out demos/single_arm
serl-chunk --exp_name fake_single_arm --learner --actor --demo_path demos/single_arm --checkpoint_path runs/arm
"""

from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.config.experiment import (
    ActorConfig,
    ChunkConfig,
    ExperimentConfig,
    LearnerConfig,
    NormaliserConfig,
    ReplayConfig,
)
from serl_chunk.config.robots import FakeSingleArmConfig


def experiment() -> ExperimentConfig:
    """State observations; fake_aloha's sizes, not tuned for this task."""
    return ExperimentConfig(
        name="fake_single_arm",
        robot=FakeSingleArmConfig(),
        agent=AcfqlConfig(),
        chunk=ChunkConfig(horizon=4),  # 0.4 s
        normaliser=NormaliserConfig(actions="absolute_range"),  # actions are moves in [-1, 1] already
        replay=ReplayConfig(capacity=100_000, demo_capacity=20_000, human_capacity=20_000),
        learner=LearnerConfig(
            utd_ratio=0.5,
            max_steps=8_000,
            pretrain_steps=6_000,
            critic_pretrain_steps=0,
            warmup_episodes=16,
            steps_per_update=50,
            checkpoint_period=2_000,
        ),
        actor=ActorConfig(clock="lockstep", intervention="scripted"),
        discount=0.98,  # 0.98**80 = 0.20
    )

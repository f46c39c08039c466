"""The simulated bimanual pick, hand-over and place task: what `make demo` trains."""

from serl_chunk.config.agents.acfql import AcfqlConfig
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
    """The effect of single settings: benchmarks/ablations.py."""
    return ExperimentConfig(
        name="fake_aloha",
        robot=FakeAlohaConfig(),
        agent=AcfqlConfig(),
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

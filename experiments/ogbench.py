"""OGBench's single-task manipulation: offline on its play data, then online (docs/benchmarks.md).

    pip install 'serl-chunk[ogbench]'
    python -c "import ogbench; ogbench.download_datasets(['cube-single-play-v0'])"
    serl-chunk --exp_name ogbench --learner --actor --demo_path ~/.ogbench/data/cube-single-play-v0.npz

Another task is --env_name scene-play-singletask-task2-v0, with its own data set.
"""

from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.config.agents.critic import CriticConfig
from serl_chunk.config.experiment import (
    ActorConfig,
    ChunkConfig,
    ExperimentConfig,
    LearnerConfig,
    NormaliserConfig,
    ReplayConfig,
)
from serl_chunk.config.robots import OgbenchConfig


def experiment() -> ExperimentConfig:
    """State observations; the lengths of the published runs, a million updates offline and a million steps online."""
    return ExperimentConfig(
        name="ogbench",
        robot=OgbenchConfig(),
        # Tuned on 20,000 updates of cube-single, task 1 (benchmarks/cube_single.py); longer runs may need a smaller lr.
        agent=AcfqlConfig(
            lr=1e-3,
            critic=CriticConfig(ensemble=2),
            expectile=0.9,
            policy_updates=1,
            bc_on="all",  # the data is play: what solves the task is a small part of it
        ),
        chunk=ChunkConfig(horizon=5),
        # Actions are moves in [-1, 1] and states are scaled already; some of theirs barely move and are noise.
        normaliser=NormaliserConfig(actions="absolute_range", state=False),
        replay=ReplayConfig(capacity=1_000_000, demo_capacity=1_100_000, human_capacity=1_000),
        learner=LearnerConfig(
            utd_ratio=1.0,
            offline_steps=1_000_000,
            online_steps=1_000_000,
            max_steps=2_000_000,
            training_starts=5_000,
            steps_per_update=100,
            checkpoint_period=50_000,
        ),
        actor=ActorConfig(clock="lockstep"),
        discount=0.99,
    )

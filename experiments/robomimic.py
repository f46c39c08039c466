"""robomimic's lift, can and square with low-dimensional observations: offline, then online (docs/benchmarks.md).

    pip install 'serl-chunk[robomimic]'
    hf download robomimic/robomimic_datasets v1.5/lift/mh/low_dim_v15.hdf5 --repo-type dataset --local-dir ~/.robomimic
    serl-chunk --exp_name robomimic --learner --actor --demo_path ~/.robomimic/v1.5/lift/mh/low_dim_v15.hdf5

The other tasks are --env_name can and --env_name square, each with its own data set.
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
from serl_chunk.config.robots import RobomimicConfig


def experiment() -> ExperimentConfig:
    """State observations; the lengths of the published runs, a million updates offline and a million steps online."""
    return ExperimentConfig(
        name="robomimic",
        robot=RobomimicConfig(),
        agent=AcfqlConfig(bc_on="all"),
        chunk=ChunkConfig(horizon=5),
        normaliser=NormaliserConfig(actions="absolute_range"),  # actions are moves in [-1, 1] already
        replay=ReplayConfig(capacity=1_000_000, demo_capacity=200_000, human_capacity=1_000),
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

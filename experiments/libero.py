"""A task of LIBERO from two cameras and the hand's state: a clone of demonstrations, for group post-training.

    pip install 'serl-chunk[libero]'            in an environment of its own (docs/benchmarks.md)
    serl-chunk --exp_name libero:libero_goal/3 --learner --actor --demo_path YOUR_DEMOS

The task follows the colon: SUITE/N with a suite of libero_spatial, libero_object, libero_goal, libero_10, libero_90, or
the suite alone for all of its tasks.
LIBERO's demonstrations are not part of the package.
"""

from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.agents.encoder import EncoderConfig
from serl_chunk.config.experiment import (
    ActorConfig,
    ChunkConfig,
    ExperimentConfig,
    LearnerConfig,
    NormaliserConfig,
    ReplayConfig,
)
from serl_chunk.config.robots import LiberoConfig


def experiment(task: str = "libero_goal/0") -> ExperimentConfig:
    """Return the experiment of a task, SUITE/N, or of a suite.

    Its sizes were not tried: no demonstrations were there to clone.
    """
    return ExperimentConfig(
        robot=LiberoConfig(env_name=task, image_size=128),  # frames of LIBERO's own demonstrations
        name=task.replace("/", "_"),  # also of run folders and spools, so that tasks do not mix
        agent=BcConfig(
            image_keys=("agentview", "robot0_eye_in_hand"), encoder=EncoderConfig(features=(32, 64, 64, 64))
        ),
        chunk=ChunkConfig(horizon=8),  # RIPT-VLA's, executed to its end
        normaliser=NormaliserConfig(actions="absolute_range"),  # actions are moves in [-1, 1] already
        replay=ReplayConfig(capacity=200_000, demo_capacity=50_000, human_capacity=1_000, image_capacity=50_000),
        learner=LearnerConfig(pretrain_steps=20_000, max_steps=20_000, steps_per_update=50, checkpoint_period=5_000),
        actor=ActorConfig(clock="lockstep"),
        discount=0.99,
    )

"""Any robot, to train on a data set of another project: `foreign_experiment.py:STATE,ACTION,LIMIT,HZ`."""

from __future__ import annotations

import gymnasium
import numpy as np

from serl_chunk import AcfqlConfig, ChunkConfig, ExperimentConfig, GymConfig, LearnerConfig, NormaliserConfig

UPDATES = 200


class Spaces(gymnasium.Env):
    """A robot that is never moved."""

    def __init__(self, state: int, action: int, limit: float) -> None:
        spaces = gymnasium.spaces
        self.observation_space = spaces.Dict({"state": spaces.Box(-np.inf, np.inf, (state,), np.float32)})
        self.action_space = spaces.Box(-limit, limit, (action,), np.float32)


def experiment(sizes: str) -> ExperimentConfig:
    state, action, limit, hz = map(float, sizes.split(","))
    return ExperimentConfig(
        name="foreign",
        robot=GymConfig(
            make=lambda fake_env, evaluating: Spaces(int(state), int(action), limit),
            robot_name="foreign",
            control_hz=hz,
            max_episode_steps=1000,
            is_real=False,
        ),
        agent=AcfqlConfig(),
        chunk=ChunkConfig(horizon=5),
        normaliser=NormaliserConfig(actions="absolute_range"),
        learner=LearnerConfig(batch_size=64, pretrain_steps=UPDATES // 2, offline_steps=UPDATES, online_steps=0),
    )

"""The experiment of the rehearsal (`lab.py`): both grippers of an ALOHA meet and close, without an object.

`lab_experiment.py:FOLDER` lets the classifier in FOLDER decide on success. Without it the operator's keys decide.
Networks are small enough for two cores to train in minutes.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.config.agents.critic import CriticConfig
from serl_chunk.config.experiment import ChunkConfig, ExperimentConfig, LearnerConfig
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.outcome import OutcomeConfig
from serl_chunk.robots.arms import aloha_arms
from serl_chunk.types import Observation

CAMERA, IMAGE_SIZE = "cam_high", 64
LONGEST = 300  # ticks of an episode
MEETING = np.array([0.0, -0.6, 0.9, 0.0, -0.3, 0.0, 1.0] * 2)  # rad and openings, as in experiments/aloha.py
GRIPPERS = [6, 13]
NEAR, CLOSED = 0.06, 0.3  # m of a tip from its place, and of an opening


def tips(joints: np.ndarray) -> np.ndarray:
    """Return where the tips of both arms are, float64[2, 3], m. Args: joints and openings, float[14]."""
    return np.stack([aloha_arms().tip(arm, np.asarray(joints, np.float64))[0][:3, 3] for arm in (0, 1)])


def closed(observation: Observation) -> bool:
    """Return whether both grippers are closed: what a picture of this size hardly shows."""
    return bool(observation["state"][GRIPPERS].max() < CLOSED)


def meets(joints: np.ndarray) -> bool:
    """Return whether both tips are where they meet, and closed: what the operator wants, and the classifier learns."""
    away = np.linalg.norm(tips(joints) - tips(MEETING), axis=1)
    return bool(away.max() < NEAR and np.max(np.asarray(joints)[GRIPPERS]) < CLOSED)


def experiment(classifier: str = "") -> ExperimentConfig:
    """Return the experiment; `classifier`: folder of one that decides on success."""
    shipped = load_experiment("aloha")
    return dataclasses.replace(
        shipped,
        name="lab",
        robot=dataclasses.replace(
            shipped.robot, cameras=(CAMERA,), image_size=IMAGE_SIZE, max_episode_steps=LONGEST, expert=None
        ),
        # The state shows this task; the camera is for the classifier.
        agent=AcfqlConfig(image_keys=(), critic=CriticConfig(hidden=(256, 256), ensemble=2)),
        chunk=ChunkConfig(horizon=25),  # 0.5 s: a hand is slow (docs/operator.md)
        learner=LearnerConfig(
            batch_size=64,
            utd_ratio=0.2,
            max_steps=400,
            pretrain_steps=6_000,
            warmup_episodes=4,
            steps_per_update=25,
            checkpoint_period=100,
            log_period=50,
        ),
        outcome=OutcomeConfig(classifier=classifier, condition=closed) if classifier else OutcomeConfig(),
        discount=0.99,
    )

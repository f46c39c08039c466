"""The experiment of the rehearsal (`lab.py`), and its tasks: a robot's tips go to their places, and its grippers close.

There is no object. `lab_experiment.py:TASK` is one of TASKS, and the operator's keys decide on success;
`lab_experiment.py:TASK:FOLDER` lets the classifier in FOLDER decide. Networks are small enough for two cores to train
in minutes.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces

from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.config.agents.critic import CriticConfig
from serl_chunk.config.experiment import ChunkConfig, ExperimentConfig, LearnerConfig
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.outcome import OutcomeConfig
from serl_chunk.config.robots import AlohaConfig, GymConfig, RobotConfig
from serl_chunk.robots.arms import aloha_arms
from serl_chunk.types import Observation
from serl_chunk_robot.geometry.kinematics import Arms, Chain, Link

CAMERA, IMAGE_SIZE = "cam_high", 64
LONGEST = 300  # ticks of an episode
NEAR, CLOSED = 0.06, 0.3  # m of a tip from its place, and of an opening
SO101_REACH = 1.5  # rad either way: calibrated ranges are of as much and a little more


class LabTask(NamedTuple):
    """One robot and its task.

    Attributes:
        robot: in the experiment.
        arms: kinematics.
        goal: of the joints, rad, with open grippers, float64[J].
        grippers: where they are in the joints, one for each arm.
    """

    robot: RobotConfig
    arms: Arms
    goal: np.ndarray
    grippers: list[int]

    def tips(self, joints: np.ndarray) -> np.ndarray:
        """Return where the tips are, float64[arms, 3], m. Args: joints and openings, float[J]."""
        joints = np.asarray(joints, np.float64)
        return np.stack([self.arms.tip(arm, joints)[0][:3, 3] for arm in range(len(self.grippers))])

    def closed(self, observation: Observation) -> bool:
        """Return whether the grippers are closed: what a picture of this size hardly shows."""
        return bool(observation["state"][self.grippers].max() < CLOSED)

    def meets(self, joints: np.ndarray) -> bool:
        """Return whether each tip is in its place, and closed: what the operator wants, and the classifier learns."""
        away = np.linalg.norm(self.tips(joints) - self.tips(self.goal), axis=1)
        return bool(away.max() < NEAR and np.asarray(joints)[self.grippers].max() < CLOSED)


def so101_arms() -> Arms:
    """Return an SO-101, about as long as it is, which looks along x: at 0 its upper arm is upright, the rest level."""
    turn, pitch, roll = (0.0, 0.0, 1.0), (0.0, 1.0, 0.0), (1.0, 0.0, 0.0)
    links = (
        Link((0.0, 0.0, 0.062), turn), Link((0.03, 0.0, 0.055), pitch), Link((0.028, 0.0, 0.113), pitch),
        Link((0.135, 0.0, 0.005), pitch), Link((0.06, 0.0, 0.0), roll),
    )  # fmt: skip
    return Arms([Chain((-0.24, 0.5, 0.2), 0.0, links, (0.1, 0.0, 0.0))], [range(5)], 6)


class _So101(gymnasium.Env[dict[str, np.ndarray], np.ndarray]):
    """The spaces of the robot; its server moves it."""

    def __init__(self) -> None:
        reach = np.full(6, SO101_REACH, np.float32)
        self.action_space = spaces.Box(np.where(np.arange(6) == 5, 0, -reach), np.where(np.arange(6) == 5, 1, reach))
        self.observation_space = spaces.Dict(
            state=spaces.Box(-np.inf, np.inf, (6,), np.float32),
            images=spaces.Dict({CAMERA: spaces.Box(0, 255, (IMAGE_SIZE, IMAGE_SIZE, 3), np.uint8)}),
        )


def _make_so101(fake_env: bool) -> gymnasium.Env[dict[str, np.ndarray], np.ndarray]:
    return _So101()


TASKS = {
    "aloha": LabTask(
        AlohaConfig(cameras=(CAMERA,), image_size=IMAGE_SIZE, max_episode_steps=LONGEST), aloha_arms(),
        np.array([0.0, -0.6, 0.9, 0.0, -0.3, 0.0, 1.0] * 2), [6, 13],  # as in experiments/aloha.py
    ),
    "so101": LabTask(
        GymConfig(
            make=_make_so101, robot_name="so101", control_hz=50.0, max_episode_steps=LONGEST, is_real=True,
            joint_of_action=tuple(range(6)), grippers=(5,),
        ),
        so101_arms(), np.array([0.0, -0.1, 0.3, 0.7, 0.0, 1.0]), [5],
    ),
}  # fmt: skip


def experiment(text: str = "aloha") -> ExperimentConfig:
    """Return the experiment; `text`: TASK, or TASK:FOLDER with the folder of a classifier that decides on success."""
    name, _, classifier = text.partition(":")
    task, shipped = TASKS[name], load_experiment("aloha")
    return dataclasses.replace(
        shipped,
        name=f"lab_{name}",
        robot=dataclasses.replace(task.robot, server="127.0.0.1", task=f"bring the tips of {name} to their places"),
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
        outcome=OutcomeConfig(classifier=classifier, condition=task.closed) if classifier else OutcomeConfig(),
        discount=0.99,
    )

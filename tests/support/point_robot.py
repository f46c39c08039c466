"""A point that shall reach the origin of the plane, its dithering demonstrator, and small experiments around it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from serl_chunk.actor.episode import EpisodeRunner
from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.config.agents.critic import CriticConfig
from serl_chunk.config.agents.flow import FlowConfig
from serl_chunk.config.experiment import ChunkConfig, ExperimentConfig, LearnerConfig, NormaliserConfig, ReplayConfig
from serl_chunk.config.robots import GymConfig
from serl_chunk.data.formats.hdf5_writer import EpisodeWriter
from serl_chunk.robots.registry import make_env
from serl_chunk.types import Outcome

SPEED = 0.1  # per tick, of a full command in one direction
REACHED = 0.12  # distance that counts as success
TIME_LIMIT = 10  # ticks: enough for who goes straight
DITHER = 0.65  # share of the demonstrator's chunks that go anywhere
HORIZON = 2


class PointEnv(gymnasium.Env):
    """State float32[2] is the position, action float32[2] in [-1, 1] the velocity; reward 1 at the origin."""

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
        self.position = np.zeros(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        angle, distance = self.np_random.uniform(0, 2 * np.pi), self.np_random.uniform(0.5, 0.7)
        self.position = distance * np.array([np.cos(angle), np.sin(angle)])
        return self.position.astype(np.float32), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.position = self.position + SPEED * action
        reached = bool(np.linalg.norm(self.position) < REACHED)
        return self.position.astype(np.float32), float(reached), reached, False, {"success": reached}


def make_point(fake_env: bool) -> PointEnv:
    """The factory that the configuration names."""
    return PointEnv()


class Ditherer:
    """Demonstrates in stretches of a chunk: straight to the origin, or (most of the time) anywhere."""

    def __init__(self, env: PointEnv) -> None:
        self.env = env

    def reset(self, seed: int) -> None:
        self.rng, self.tick = np.random.default_rng(seed), 0

    def act(self) -> np.ndarray:
        if self.tick % HORIZON == 0:
            self.dithers, angle = self.rng.uniform() < DITHER, self.rng.uniform(0, 2 * np.pi)
            self.direction = np.array([np.cos(angle), np.sin(angle)])
        self.tick += 1
        towards = -self.env.position / np.linalg.norm(self.env.position)
        return (self.direction if self.dithers else towards).astype(np.float32)


def experiment(**learner: Any) -> ExperimentConfig:
    """Small enough for a test; `learner` changes its LearnerConfig."""
    settings = {
        "batch_size": 64, "utd_ratio": 1.0, "max_lag_steps": 20, "training_starts": 20, "warmup_episodes": 2,
        "pretrain_steps": 40, "max_steps": 60, "steps_per_update": 20,
        "checkpoint_period": 40, "log_period": 10,
    }  # fmt: skip
    return ExperimentConfig(
        name="point",
        robot=GymConfig(make=make_point, robot_name="point", max_episode_steps=TIME_LIMIT),
        agent=AcfqlConfig(
            lr=2e-3,
            critic=CriticConfig((32, 32), 2, tau=0.02),
            flow=FlowConfig(hidden=(32, 32), steps=4),
            candidates=16,
            policy_ema=0.99,
            bc_on="all",
            policy_updates=1,
        ),
        chunk=ChunkConfig(HORIZON),
        normaliser=NormaliserConfig(actions="absolute_range"),
        # Agents of tests share the compiled update of batches.
        replay=ReplayConfig(capacity=5_000, demo_capacity=2_000, human_capacity=100),
        learner=LearnerConfig(**{**settings, **learner}),
        discount=0.9,
        seed=5,
    )


def record_demos(folder: Path, count: int) -> str:
    """`count` successful episodes of the demonstrator, who has all the time he wants; returns the folder."""
    config = experiment()
    config = dataclasses.replace(config, robot=dataclasses.replace(config.robot, max_episode_steps=200))
    env = make_env(config.robot)
    expert = Ditherer(env.env)
    with EpisodeWriter(folder, env.robot_spec, keep=lambda e: e.end.outcome is Outcome.SUCCESS) as writer:
        runner = EpisodeRunner(env, expert, writer, config=config)
        seed = kept = 0
        while kept < count:
            kept += runner.run_episode(seed).success
            seed += 1
    env.close()
    return str(folder)

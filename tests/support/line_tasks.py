"""A point on a line whose goal is one of the two ends, named by the task's text alone: an experiment with variants.

`line_tasks.py:left` and `:right` differ by the text and by the end that is a success; observations do not tell them.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from serl_chunk.actor.episode import EpisodeRunner
from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.agents.flow import FlowConfig
from serl_chunk.config.agents.language import LanguageConfig
from serl_chunk.config.experiment import ChunkConfig, ExperimentConfig, LearnerConfig, NormaliserConfig, ReplayConfig
from serl_chunk.config.robots import GymConfig
from serl_chunk.data.formats.hdf5_writer import EpisodeWriter
from serl_chunk.robots.registry import make_env
from serl_chunk.types import Outcome

SIDES = {"left": -1.0, "right": 1.0}
TEXTS = {side: f"go to the {side} end" for side in SIDES}
SPEED = 0.2  # per tick, of a full command
TIME_LIMIT = 12  # ticks
EPISODES = 20  # of each actor


class LineEnv(gymnasium.Env):
    """State float32[2] is the position, twice; action float32[1] in [-1, 1] the velocity; reward 1 at the goal.

    Either end ends the episode.
    """

    def __init__(self, goal: float) -> None:
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
        self.goal, self.position = goal, 0.0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.position = float(self.np_random.uniform(-0.3, 0.3))
        return self._state(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.position += SPEED * float(action[0])
        reached = self.position * self.goal >= 1
        return self._state(), float(reached), abs(self.position) >= 1, False, {"success": reached}

    def _state(self) -> np.ndarray:
        return np.full(2, self.position, np.float32)


class Demonstrator:
    """Goes straight to the goal, with some noise."""

    def __init__(self, goal: float) -> None:
        self.goal = goal

    def reset(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def act(self) -> np.ndarray:
        return np.array([self.goal * self.rng.uniform(0.6, 1)], np.float32)


def make_line(fake_env: bool, *, goal: float) -> LineEnv:
    """The factory that the configuration names, for a goal."""
    return LineEnv(goal)


def experiment(side: str = "left") -> ExperimentConfig:
    """A clone of demonstrations that reads language; the actors of both sides fill the warm-up together."""
    return ExperimentConfig(
        name="line_tasks",
        robot=GymConfig(
            make=functools.partial(make_line, goal=SIDES[side]), robot_name="line", max_episode_steps=TIME_LIMIT,
            task=TEXTS[side],
        ),
        agent=BcConfig(
            lr=3e-3, flow=FlowConfig(hidden=(32, 32), steps=4), policy_ema=0.98, policy_updates=1,
            language=LanguageConfig("bytes", 24),
        ),
        chunk=ChunkConfig(2),
        normaliser=NormaliserConfig(actions="absolute_range"),
        replay=ReplayConfig(capacity=5_000, demo_capacity=2_000, human_capacity=100),
        learner=LearnerConfig(
            batch_size=64, pretrain_steps=300, warmup_episodes=2 * EPISODES - 10, training_starts=20,
            steps_per_update=20, log_period=10,
        ),
        discount=0.9,
        seed=7,
    )  # fmt: skip


def record_demos(folder: Path, side: str, count: int) -> str:
    """Record `count` episodes that go to one end; return the folder."""
    config = experiment(side)
    env = make_env(config.robot)
    with EpisodeWriter(folder, env.robot_spec, keep=lambda e: e.end.outcome is Outcome.SUCCESS) as writer:
        runner = EpisodeRunner(env, Demonstrator(SIDES[side]), writer, config=config)
        for seed in range(count):
            assert runner.run_episode(seed).success
    env.close()
    return str(folder)

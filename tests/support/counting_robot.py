"""A robot that writes down every step it was asked for, independent of the product: what faults are counted by.

An experiment file. COUNTING_ROBOT_LOG names the file; each process is a *life* with a number of its own.
COUNTING_ROBOT_PAUSE is how long a step takes at least, in seconds: without a clock it would take no time.
"""

from __future__ import annotations

import os
import time

import gymnasium
import numpy as np
from gymnasium import spaces

import serl_chunk as sc

LENGTH = 40  # ticks of an episode
HZ = 50
LOG = "COUNTING_ROBOT_LOG"
PAUSE = "COUNTING_ROBOT_PAUSE"
CLOSED = ".closed"  # beside the log: the processes that closed their robot


class CountingRobot(gymnasium.Env):
    """State: life, episode, tick, a random number. Each step goes to the log in one write."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.life = int.from_bytes(os.urandom(3), "big")  # a float32 holds 24 bits
        self.episode = -1
        self.random = np.random.default_rng(self.life)
        self.log = os.open(os.environ[LOG], os.O_CREAT | os.O_WRONLY | os.O_APPEND) if LOG in os.environ else None
        self.pause = float(os.environ.get(PAUSE, "0"))

    def _observe(self) -> np.ndarray:
        self.state = np.array([self.life, self.episode, self.tick, self.random.uniform()], np.float32)
        return self.state

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.tick, self.episode = 0, self.episode + 1
        return self._observe(), {}

    def step(self, action):
        row = [*self.state.tolist(), *np.asarray(action, np.float32).tolist()]
        if self.log is not None:
            os.write(self.log, (" ".join(x.hex() for x in map(float, row)) + "\n").encode())
        time.sleep(self.pause)
        self.tick += 1
        success = self.tick == LENGTH and self.episode % 2 == 0
        return self._observe(), float(success), success, self.tick >= LENGTH, {"success": success}

    def close(self):
        if self.log is not None:
            with open(os.environ[LOG] + CLOSED, "a") as file:
                file.write(f"{os.getpid()}\n")


def experiment() -> sc.ExperimentConfig:
    make = lambda fake_env: CountingRobot()  # noqa: E731
    return sc.ExperimentConfig(
        name="counting_robot",
        robot=sc.GymConfig(make=make, robot_name="counter", control_hz=HZ, max_episode_steps=LENGTH),
        agent=sc.AcfqlConfig(
            critic=sc.CriticConfig(hidden=(16,), ensemble=2), flow=sc.FlowConfig(hidden=(16,), steps=2), candidates=2
        ),
        chunk=sc.ChunkConfig(horizon=5), normaliser=sc.NormaliserConfig(actions="absolute_range"),
        replay=sc.ReplayConfig(capacity=100_000, demo_capacity=10, human_capacity=100),
        learner=sc.LearnerConfig(
            batch_size=16, utd_ratio=0.2, max_steps=10_000_000, training_starts=40, warmup_episodes=1,
            steps_per_update=5, log_period=20, checkpoint_period=10,
        ),
        actor=sc.ActorConfig(clock="realtime"), transport=sc.TransportConfig(timeout_s=2.0),
    )  # fmt: skip

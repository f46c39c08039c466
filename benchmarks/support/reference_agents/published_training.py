"""Offline training of the published code on an OGBench data set. Runs in any interpreter that has what it imports."""

from __future__ import annotations

import importlib
import random
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

DISCOUNT = 0.99
CLIP = 1e-5  # of actions in the data, as the published loader does


class PublishedTraining:
    """An agent, its data set and its environment, all by modules of a checkout."""

    def open(
        self, agent: str, options: Mapping[str, Any], data: str, task: str, seed: int, horizon: int, batch: int
    ) -> None:
        """Read the data, and build agent and environment.

        Args:
            agent: `acfql` or `acrlpd`.
            options: of its configuration; what is not named is as published.
            data: OGBench's .npz, whose rewards are computed for `task`.
            task: ENV-DATA-singletask-taskN-v0.
        """
        loader = importlib.import_module("envs.ogbench_utils")
        monitor = importlib.import_module("envs.env_utils").EpisodeMonitor
        env = loader.make_ogbench_env_and_datasets(task, env_only=True)
        self._env = monitor(env, filter_regexes=[".*privileged.*", ".*proprio.*"])
        rows = loader.load_dataset(data, add_info=True)
        importlib.import_module("ogbench.relabel_utils").relabel_dataset(task, env, rows)
        rows = {
            name: rows[name]
            for name in ("observations", "actions", "next_observations", "terminals", "rewards", "masks")
        }
        rows["actions"] = np.clip(rows["actions"], CLIP - 1, 1 - CLIP)
        self._data = importlib.import_module("utils.datasets").Dataset.create(**rows)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 (the published sampler draws from it)
        config = importlib.import_module(f"agents.{agent}").get_config()
        config.update({"horizon_length": horizon, "batch_size": batch})
        for name, value in options.items():
            config[name] = tuple(value) if isinstance(value, list) else value
        self._sizes = batch, horizon
        example = rows["observations"][0], rows["actions"][0]
        self._agent = importlib.import_module("agents").agents[agent].create(seed, *example, config)
        self._evaluate = importlib.import_module("evaluation").evaluate

    def train(self, updates: int) -> float:
        """Make updates, and return the seconds they took."""
        batch, horizon = self._sizes
        begin = time.perf_counter()
        for _ in range(updates):
            rows = self._data.sample_sequence(batch, sequence_length=horizon, discount=DISCOUNT)
            self._agent, info = self._agent.update(rows)
        jax.block_until_ready((self._agent.network.params, info))
        return time.perf_counter() - begin

    def evaluate(self, episodes: int) -> int:
        """Return the successes of the published evaluation: sampled actions, and starts drawn anew."""
        stats, _, _ = self._evaluate(
            agent=self._agent, env=self._env, action_dim=self._data["actions"].shape[-1], num_eval_episodes=episodes
        )
        return round(float(stats["success"]) * episodes)

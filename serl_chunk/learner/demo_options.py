"""Reads the data that a learner begins with: `--demo_path` and `--dataset_dir`."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.robots import OgbenchConfig, RobotConfig
from serl_chunk.data.demos import DemoSet, NoDemosFoundError, find_demos, load_demos
from serl_chunk.data.formats.ogbench import OgbenchSource
from serl_chunk.data.rotating_dataset import ShardedSource
from serl_chunk.data.source import ReadOptions
from serl_chunk.io import plural
from serl_chunk.runs.episodes import FORMAT
from serl_chunk.types import ConfigError, RobotSpec

logger = logging.getLogger(__name__)

_TEXTS = 10  # that a log line names


class DemoOptions(NamedTuple):
    """How `--demo_path`, or the shards in the folder `dataset` (`--dataset_dir`), are read."""

    options: ReadOptions = ReadOptions(solved="keep")
    format: str | None = None
    dataset: str | None = None

    def of_robot(self, robot: RobotConfig) -> DemoOptions:
        """Add what a robot's configuration sets: an OGBench environment is the task whose rewards its data get."""
        if not isinstance(robot, OgbenchConfig):
            return self
        task = self.options.env
        options = dataclasses.replace(
            self.options, env=task or robot.env_name, env_if_judged=not task, env_reward=robot.reward
        )
        return self._replace(options=options)


def read_demos(config: ExperimentConfig, spec: RobotSpec, paths: Sequence[str], demo_options: DemoOptions) -> DemoSet:
    """Read the demonstrations of `--demo_path`, and log their number; raises DataError or ConfigError."""
    check_data(config, paths, demo_options)
    demos = load_demos(
        paths, spec, cameras=config.agent.image_keys, options=demo_options.options, format=demo_options.format,
        more=(FORMAT,),
    )  # fmt: skip
    if paths:
        _check_task(demo_options, sorted({origin.format for origin in demos.origins}))
        steps = sum(e.steps.n for e in demos.episodes)
        more = f", {demos.duplicates} duplicates left out" if demos.duplicates else ""
        more += f", {demos.dropped_steps} steps after a success dropped" if demos.dropped_steps else ""
        for note in demos.notes:
            logger.info(f"demonstrations: {note}")
        logger.info(f"demonstrations: {len(demos.episodes)} episodes, {steps} steps{more}")
        if config.agent.language.reads:
            _log_texts(config, demos)
    return demos


def _log_texts(config: ExperimentConfig, demos: DemoSet) -> None:
    """Log what an agent that reads language learns from demonstrations; warn where the robot's text is none of it."""
    own = config.robot.task
    texts = Counter(episode.begin.task or own for episode in demos.episodes)
    shown = ", ".join(f"{text!r} ({plural(count, 'episode')})" for text, count in texts.most_common(_TEXTS))
    logger.info(f"language: {plural(len(texts), 'text')} of tasks: {shown}{', ...' if len(texts) > _TEXTS else ''}")
    if texts and own not in texts:
        logger.warning(
            f"robot.task={own!r} is the text of no demonstration: a policy that reads it was not trained for it. Give "
            "one of theirs as --task"
        )


def _check_task(demo_options: DemoOptions, read: Sequence[str]) -> None:
    given = demo_options.options.env and not demo_options.options.env_if_judged
    if given and demo_options.dataset is None and OgbenchSource.format not in read:
        needs = f"computes rewards for data of OGBench (got format {', '.join(read)})"
        raise ConfigError(f"--demo_env={demo_options.options.env} {needs}. Leave it out, or give such data")


def check_data(config: ExperimentConfig, paths: Sequence[str], demo_options: DemoOptions) -> None:
    """Raise ConfigError where `--demo_path` or `--dataset_dir` leads to nothing, before a run has a folder."""
    try:
        find_demos(paths, demo_options.options, demo_options.format, (FORMAT,))
    except NoDemosFoundError as error:
        raise ConfigError(append_hint(error.message, config), parameter=error.parameter) from error
    if demo_options.dataset is not None and not Path(demo_options.dataset).expanduser().is_dir():
        raise ConfigError(append_hint(f"--dataset_dir={demo_options.dataset}: there is no such folder", config))


def append_hint(message: str, config: ExperimentConfig) -> str:
    """Append to `message` where the robot's published data come from, if it has such."""
    return f"{message}. {config.robot.data_hint}" if config.robot.data_hint else message


def open_dataset(
    config: ExperimentConfig, spec: RobotSpec, demo_options: DemoOptions, updates: int = 0
) -> ShardedSource | None:
    """Open the shards of `--dataset_dir`, if given, at the one of a resumed run's `updates`; DataError, ConfigError."""
    if demo_options.dataset is None:
        return None
    check_data(config, (), demo_options)
    options = dataclasses.replace(demo_options.options, spec=spec, cameras=tuple(config.agent.image_keys))
    dataset = ShardedSource(
        demo_options.dataset, options,
        replace_interval=config.replay.dataset_replace_interval, seed=config.seed, updates=updates,
    )  # fmt: skip
    for note in dataset.notes:
        logger.info(f"data set: {note}")
    steps = sum(e.steps.n for e in dataset.episodes)
    logger.info(
        f"data set: {len(dataset.files)} shards, a new one every {config.replay.dataset_replace_interval} updates; "
        f"{dataset.current.name}: {len(dataset.episodes)} episodes, {steps} steps"
    )
    return dataset

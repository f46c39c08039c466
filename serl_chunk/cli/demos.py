"""The data that a learner begins with: `--demo_path` and `--dataset_dir`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from serl_chunk.cli.data.options import parse_scores
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.robots import OgbenchConfig, RobotConfig
from serl_chunk.data.demos import Demonstrations, DemoSet, NothingThere, find_demos, load_demos
from serl_chunk.data.formats.ogbench import OgbenchSource
from serl_chunk.data.rotating_dataset import ShardedSource
from serl_chunk.data.source import ReadOptions
from serl_chunk.runs.episodes import FORMAT
from serl_chunk.types import ConfigError, DataError, RobotSpec

_FLAGS = re.compile(r"--(scores|success|failure|hz|color|env|proportion)\b")


@contextlib.contextmanager
def _learner_flags() -> Iterator[None]:
    """What is wrong with data names the flags of `serl-chunk data`; a learner's begin with --demo_."""
    try:
        yield
    except (ConfigError, DataError) as error:
        raise type(error)(as_learner_flags(str(error))) from error


def as_learner_flags(text: str) -> str:
    """`text` with the learner's names of the flags that say how data are read."""
    return _FLAGS.sub(r"--demo_\1", text)


class DemoReading(NamedTuple):
    """How `--demo_path` is read: what the files do not say about themselves, and what they are.

    `dataset`: the folder of shards that `--dataset_dir` names, read in the same way.
    """

    options: ReadOptions = ReadOptions(solved="keep")
    format: str | None = None
    dataset: str | None = None

    @classmethod
    def of(cls, flags: argparse.Namespace) -> DemoReading:
        """As `--demo_color` and its like say; raises ConfigError."""
        success = True if flags.demo_success else False if flags.demo_failure else None
        if flags.demo_hz is not None and not 0 < flags.demo_hz < math.inf:
            raise ConfigError(f"--demo_hz={flags.demo_hz:g} must be above 0")
        with _learner_flags():
            scores = parse_scores(flags.demo_scores)
        options = ReadOptions(
            color=flags.demo_color,
            hz=flags.demo_hz,
            success=success,
            scores=scores,
            env=flags.demo_env,
            proportion=flags.demo_proportion,
            solved=flags.demo_solved,
        )
        return cls(options, flags.demo_format, flags.dataset_dir)

    def of_robot(self, robot: RobotConfig) -> DemoReading:
        """With what a robot says of its data: an OGBench environment is the task whose rewards they get."""
        if not isinstance(robot, OgbenchConfig):
            return self
        asked = self.options.env
        options = dataclasses.replace(
            self.options, env=asked or robot.env_name, env_if_judged=not asked, env_reward=robot.reward
        )
        return self._replace(options=options)


def read_demos(
    config: ExperimentConfig,
    spec: RobotSpec,
    paths: Sequence[str],
    tell: Callable[[str], None],
    reading: DemoReading = DemoReading(),  # noqa: B008 (immutable)
) -> DemoSet:
    """The demonstrations of `--demo_path`, said in one line; raises DataError or ConfigError."""
    check_data(config, paths, reading)
    with _learner_flags():
        demos = load_demos(
            paths, spec, cameras=config.agent.image_keys, options=reading.options, format=reading.format, more=(FORMAT,)
        )
    if paths:
        _check_task(reading, sorted({origin.format for origin in demos.origins}))
        steps = sum(e.steps.n for e in demos.episodes)
        more = f", {demos.duplicates} duplicates left out" if demos.duplicates else ""
        more += f", {demos.dropped_steps} steps after a success dropped" if demos.dropped_steps else ""
        for note in demos.notes:
            tell(f"demonstrations: {as_learner_flags(note)}")
        tell(f"demonstrations: {len(demos.episodes)} episodes, {steps} steps{more}")
    return demos


def _check_task(reading: DemoReading, read: Sequence[str]) -> None:
    """Raise ConfigError where `--demo_env` is given and nothing of the formats `read` has rewards computed."""
    asked = reading.options.env and not reading.options.env_if_judged
    if asked and reading.dataset is None and OgbenchSource.format not in read:
        raise ConfigError(
            f"--demo_env={reading.options.env}: rewards are computed for data of OGBench, and these are of format "
            f"{', '.join(read)}: leave it out, or give the data it is meant for"
        )


def check_data(config: ExperimentConfig, paths: Sequence[str], reading: DemoReading) -> None:
    """Raise ConfigError where `--demo_path` or `--dataset_dir` leads to nothing, before a run has a folder."""
    try:
        with _learner_flags():
            find_demos(paths, reading.options, reading.format, (FORMAT,))
    except NothingThere as error:
        raise ConfigError(with_hint(str(error), config)) from error
    if reading.dataset is not None and not Path(reading.dataset).expanduser().is_dir():
        raise ConfigError(with_hint(f"--dataset_dir={reading.dataset}: there is no such folder", config))


def with_hint(message: str, config: ExperimentConfig) -> str:
    """`message` and where the robot's published data come from, if it has such."""
    return f"{message}. {config.robot.data_hint}" if config.robot.data_hint else message


def open_dataset(
    config: ExperimentConfig,
    spec: RobotSpec,
    reading: DemoReading,
    tell: Callable[[str], None],
    updates: int = 0,
) -> ShardedSource | None:
    """The shards of `--dataset_dir`, None where it is not given; raises DataError or ConfigError.

    `updates`: those that a run which goes on has made, so that it begins with the shard it had.
    """
    if reading.dataset is None:
        return None
    check_data(config, (), reading)
    options = dataclasses.replace(reading.options, spec=spec, cameras=tuple(config.agent.image_keys))
    dataset = ShardedSource(
        reading.dataset,
        options,
        replace_interval=config.replay.dataset_replace_interval,
        seed=config.seed,
        updates=updates,
        open_shard=lambda path, said: Demonstrations(OgbenchSource(path, said), spec),
    )
    for note in dataset.notes:
        tell(f"data set: {note}")
    steps = sum(e.steps.n for e in dataset.episodes)
    tell(
        f"data set: {len(dataset.files)} shards, another one each {config.replay.dataset_replace_interval} updates; "
        f"{dataset.current.name}: {len(dataset.episodes)} episodes, {steps} steps"
    )
    return dataset

"""Data that a learner has before any actor sends steps: demonstrations, a data set, and features of what they show."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.robots import OgbenchConfig, RobotConfig
from serl_chunk.data.demos import DemoSet, NoEpisodesError, find_demos, load_demos
from serl_chunk.data.formats.ogbench import OgbenchSource
from serl_chunk.data.rotating_dataset import ShardedSource
from serl_chunk.data.source import ReadOptions
from serl_chunk.io import plural
from serl_chunk.replay.replay import Replay
from serl_chunk.runs.episodes import FORMAT
from serl_chunk.types import ConfigError, Episode, Outcome, RobotSpec

logger = logging.getLogger(__name__)

_TEXTS = 10  # that a log line names
PIECE = 64  # inputs of one piece of work: short enough for stops and progress in between
LOG_PERIOD = 5.0  # seconds between lines


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
        read, task = sorted({origin.format for origin in demos.origins}), demo_options.options.env
        given = task and not demo_options.options.env_if_judged
        if given and demo_options.dataset is None and OgbenchSource.format not in read:
            needs = f"computes rewards for data of OGBench (got format {', '.join(read)})"
            raise ConfigError(f"--demo_env={task} {needs}. Leave it out, or give such data")
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
    """Log what an agent that reads language learns from demonstrations; warn of missing texts, and of tasks without."""
    texts = Counter(episode.begin.task or config.robot.task for episode in demos.episodes)
    shown = ", ".join(f"{text!r} ({plural(count, 'episode')})" for text, count in texts.most_common(_TEXTS))
    logger.info(f"language: {plural(len(texts), 'text')} of tasks: {shown}{', ...' if len(texts) > _TEXTS else ''}")
    if "" in texts:  # of a robot with several tasks
        logger.warning(
            f"{plural(texts[''], 'demonstration')} without a text: the policy learns them with none, and the robot's "
            "episodes have their task's. Write it into them (serl-chunk data convert --task)"
        )
    if texts and (untold := [task for task in dict.fromkeys(config.robot.tasks) if task not in texts]):
        logger.warning(
            f"robot.task={', '.join(map(repr, untold))} is the text of no demonstration: a policy that reads it was "
            "not trained for it. Give one of theirs as --task, or demonstrations of each task"
        )


def check_data(config: ExperimentConfig, paths: Sequence[str], demo_options: DemoOptions) -> None:
    """Raise ConfigError where `--demo_path` or `--dataset_dir` leads to nothing, before a run has a folder."""
    try:
        find_demos(paths, demo_options.options, demo_options.format, (FORMAT,))
    except NoEpisodesError as error:
        raise ConfigError(append_hint(error.message, config), parameter=error.parameter or "demo_path") from error
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


class InitialData(NamedTuple):
    """Demonstrations that stay for the whole run, and a data set, in the state it is opened in.

    `tasks`: those of the robot, by their texts, with the saved states that each can begin in (`RobotEnv.states_of`).
    """

    demos: Sequence[Episode] = ()
    dataset: ShardedSource | None = None
    tasks: Mapping[str, Sequence[str]] = MappingProxyType({})

    def require(self, experiment: ExperimentConfig) -> None:
        """Raise ConfigError where an experiment trains on demonstrations and there are none."""
        config = experiment.learner
        if self.demos or self.dataset is not None:
            self._warn_of_outcomes(experiment)
            return
        if config.pretrain_steps or config.critic_pretrain_steps:
            text = (
                "pretraining needs demonstrations. Give some (demo_path), or set learner.pretrain_steps=0 and "
                "learner.critic_pretrain_steps=0"
            )
            raise ConfigError(text, parameter="learner.pretrain_steps")
        if config.offline_steps:
            text = "the offline phase needs demonstrations (demo_path) or a data set (dataset_dir). Give one of them"
            raise ConfigError(text, parameter="learner.offline_steps")

    def _warn_of_outcomes(self, config: ExperimentConfig) -> None:
        """Warn where a critic that is trained offline gets no success, or no failure."""
        agent, n = config.agent, plural(len(self.demos), "demonstration")
        if self.dataset is not None or not (agent.has_critic and config.learner.offline_steps):
            return
        if len({reward for e in self.demos for reward in np.unique(e.rewards)}) == 1:
            logger.warning(
                f"no success among {n}: every step has the same reward, of which no critic learns. Give episodes that "
                "succeed, or set how they ended (demo_success, demo_scores)"
            )
        elif agent.learns_to_choose and not _fail(self.demos):
            logger.warning(
                f"no failure among {n}: the critic chooses no candidate until an actor has failed. Give episodes that "
                "failed, too, or set how they ended (demo_scores)"
            )


class OfflineData:
    """Puts a run's initial data into the replay, and later the parts of the data set that take each other's place.

    Args:
        seek: updates of the checkpoint that the run resumes from; None for a fresh run.
        seen: called with all of the data, part by part.
    """

    def __init__(
        self, replay: Replay, data: InitialData, *, seek: int | None, seen: Callable[[Sequence[Episode]], None]
    ) -> None:
        self._replay, self._seen = replay, seen
        demos, self._dataset = data.demos, data.dataset
        first: list[Episode] = []
        if demos or self._dataset is None:
            replay.add_demo(*demos)
        if self._dataset is not None:
            if seek is not None:
                self._dataset.seek(seek)
            first = self._dataset.take()
            replay.replace_demos(first)
        self.episodes = len(demos) + len(first)  # at the start
        # A critic that has seen successes alone misleads an actor that chooses by it. Of a data set: the parts so far.
        self.has_failures = _fail([*demos, *first])
        seen([*demos, *first])

    def check(self, config: ExperimentConfig) -> None:
        """Raise ConfigError where the phases before the first snapshot would have nothing to train on."""
        learner = config.learner
        if learner.pretrain_steps or learner.critic_pretrain_steps or learner.offline_steps:
            self.require_window()
        if learner.pretrain_steps:
            self.require_imitated(config)

    def require_imitated(self, config: ExperimentConfig) -> None:
        """Raise ConfigError where a pretrained policy would imitate none of the steps that are there at the start."""
        # The published code imitates every row as it is; later parts of a data set may have what this one has not.
        if config.agent.imitates_all_rows or self._dataset is not None or self._replay.imitates_demos:
            return
        human_only = config.imitated == "interventions"
        raise ConfigError(
            f"no step of these {self.episodes} demonstrations is imitated: agent.bc_on={config.imitated} takes the "
            f"steps of successful or undecided ones{' that a human acted on' if human_only else ''}, failed ones "
            f"never. Give others, {'set agent.bc_on=demo, ' if human_only else ''}or set learner.pretrain_steps=0",
            parameter="learner.pretrain_steps",
        )

    def require_window(self) -> None:
        """Raise ConfigError where what is there at the start has no window to train on."""
        if self._replay.ready.demo:
            return
        stats = self._replay.stats()
        episodes = int(stats["replay/demo_episodes"])
        steps = int(stats["replay/demo_rows"]) - episodes  # a row of each is for its final observation
        found = f"a window takes {self._replay.window_steps} steps in a row, they have {steps} in {episodes} episodes"
        remedy = "Give longer ones, or lower chunk.horizon, chunk.critic_horizon or chunk.return_steps"
        if stats["replay/excluded_share"]:
            found += ", but no image of every camera that is recent enough where one begins and ends"
            remedy = "Raise replay.max_image_age, or give demonstrations with more frames"
        raise ConfigError(
            f"the demonstrations hold no window to train on: {found}. {remedy}; or do not train on them alone: set "
            "learner.pretrain_steps, learner.critic_pretrain_steps and learner.offline_steps to 0"
        )

    @property
    def updates_left(self) -> int | None:
        """Updates up to another part of the data set; None where there is none. It may come later, not sooner."""
        return None if self._dataset is None else self._dataset.updates_left

    def advance(self, updates: int) -> None:
        """Count `updates`; put another part of the data set into the replay where it is in use after them."""
        if self._dataset is not None and sum(self._dataset.advance() for _ in range(updates)):
            part = self._dataset.take()
            self.has_failures = self.has_failures or _fail(part)
            self._replay.replace_demos(part)
            self._seen(part)

    def close(self) -> None:
        if self._dataset is not None:
            self._dataset.close()


def _fail(episodes: Sequence[Episode]) -> bool:
    return any(e.end.outcome is not Outcome.SUCCESS for e in episodes)


def precompute_features(replay: Replay, now: Callable[[], float] = time.monotonic) -> Iterator[int]:
    """Compute the features that are missing at the first `next`, a piece each, with progress lines.

    Those of later frames and observations are left to the batches that show them. Yields the number done; raises
    DataError for a demonstration's file that cannot be read.
    """
    total, done = replay.features_missing, 0
    begun = logged = now()
    while done < total:
        computed = replay.compute_features(PIECE)
        # Fewer may be left than there were: episodes leave.
        done = min(total, done + computed) if computed else total
        if done == total:
            logger.info(f"{total:,} features of stored observations computed in {now() - begun:.1f} s")
        elif now() - logged >= LOG_PERIOD:
            logged = now()
            logger.info(f"computing features of stored observations: {done:,} of {total:,}")
        yield done

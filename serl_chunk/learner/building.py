"""The learner of a run, from the experiment, its data and what the run's folder holds."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from serl_chunk.agents.base import Agent
from serl_chunk.agents.registry import make_agent
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.fields import require
from serl_chunk.config.overrides import to_dict
from serl_chunk.data.demos import DemoSet
from serl_chunk.data.preprocess import Preprocess, fit_preprocess
from serl_chunk.data.prompts import tokens_digest
from serl_chunk.io import os_reason
from serl_chunk.learner.devices import Devices
from serl_chunk.learner.learner import Learner, Publish, check_replay_memory, restored_preprocess
from serl_chunk.learner.offline_data import (
    DemoOptions,
    InitialData,
    OfflineData,
    append_hint,
    open_dataset,
    read_demos,
)
from serl_chunk.learner.schedule import Check, Evaluate
from serl_chunk.learner.training_stats import ValueRange
from serl_chunk.replay.memory import replay_size
from serl_chunk.replay.replay import Replay
from serl_chunk.runs.checkpoints import CheckpointStore, PolicyCheckpoint
from serl_chunk.runs.episodes import DEMOS, is_run, note_of
from serl_chunk.runs.evaluations import wanted_policy
from serl_chunk.runs.folder import RunFolder, write_json
from serl_chunk.runs.metrics import MetricsLog
from serl_chunk.types import ConfigError, DataError, Episode, RobotSpec

logger = logging.getLogger(__name__)


class RunOptions(NamedTuple):
    """What a training run is started with, apart from the experiment."""

    demo_paths: Sequence[str] = ()
    checkpoint_path: str | None = None  # the run folder; None for a new one
    demo_options: DemoOptions = DemoOptions()
    wandb: bool = False  # whether the metrics are sent to Weights & Biases
    profile: int = 0  # updates that are traced
    n_envs: int | None = None  # simulators of the learner's own evaluations; None: see `rollouts.envs_at_once`


def build_learner(
    config: ExperimentConfig,
    options: RunOptions,
    run: RunFolder,
    spec: RobotSpec,
    *,
    publish: Publish,
    threaded: bool,
    evaluation: Callable[[Agent], Evaluate] | None = None,
    check: Check | None = None,
    agent: Agent | None = None,
    tasks: Mapping[str, Sequence[str]] | None = None,
    devices: Devices | None = None,
) -> Learner:
    """Build the learner of a run with data, metrics and checkpoint; the caller closes it. Raises SerlChunkError.

    Args:
        evaluation: makes what evaluates the agent where `learner.eval_interval` is set.
        check: see `Learner`.
        tasks: see `InitialData`.
        agent: that of `config`, where it is made already: its base is read from a file once.
        devices: see `Learner`.
    """
    agent = agent or make_agent(config, spec)
    begins = read_beginning(config, options, spec, agent, run.path, tasks)
    project, name = "serl-chunk" if options.wandb else None, f"{config.name}-{run.path.name}"
    metrics = MetricsLog(run.path, wandb_project=project, wandb_name=name, config=to_dict(config))
    evaluate: Evaluate | None = None
    with contextlib.ExitStack() as failed:
        failed.callback(metrics.close)  # wandb would wait for this run's end
        if evaluation is not None and config.eval_interval:
            evaluate = evaluation(agent)
            failed.callback(evaluate.close)
        learner = Learner(
            config, spec, agent, begins.preprocess, begins.data, metrics, publish=publish, threaded=threaded,
            evaluate=evaluate, check=check, start=begins.start, profile=options.profile, devices=devices,
        )  # fmt: skip
        run.write_config()  # not before: until then the files of the previous process stay
        try:
            write_json(run.path / DEMOS, note_of(begins.demos, options.demo_options.of_robot(config.robot).options))
        except OSError as error:
            raise ConfigError(f"{run.path / DEMOS} cannot be written: {os_reason(error)}") from error
        failed.pop_all()
    if learner.devices.several:
        learner.devices.log((learner.state, learner.base))
    logger.info(replay_size(config, learner.replay.estimated_bytes))
    return learner


class Beginning(NamedTuple):
    """What a learner begins with, apart from the weights of its agent."""

    demos: DemoSet
    data: InitialData
    start: PolicyCheckpoint | None  # of `learner.start_from`
    preprocess: Preprocess  # fitted to the data, or that of `start`


def read_beginning(
    config: ExperimentConfig, options: RunOptions, spec: RobotSpec, agent: Agent, folder: Path | None,
    tasks: Mapping[str, Sequence[str]] | None = None,
) -> Beginning:  # fmt: skip
    """Read the data and fit the statistics of a run in `folder`, which may be absent. Raises SerlChunkError."""
    check_replay_memory(config, spec, agent)  # before data are read and networks compiled
    demo_options = options.demo_options.of_robot(config.robot)
    demos = read_demos(config, spec, options.demo_paths, demo_options)
    resumed = None if folder is None else CheckpointStore(folder).newest()
    dataset = open_dataset(config, spec, demo_options, resumed or 0)
    data = InitialData(demos.episodes, dataset, tasks or {})
    try:
        data.require(config)
    except ConfigError as error:
        raise ConfigError(append_hint(str(error), config)) from error
    # Nothing here keeps the shard: the learner takes it out of the data set, and later ones need its room.
    fitted = [*demos.episodes, *(dataset.episodes if dataset is not None else ())]
    start = None if resumed is not None else _starting_policy(config)  # the other run may be gone
    return Beginning(demos, data, start, _preprocess(config, spec, folder, fitted, start))


def check_beginning(
    config: ExperimentConfig, options: RunOptions, spec: RobotSpec, agent: Agent, folder: Path | None
) -> dict[str, str]:
    """Check what a learner in `folder` would begin with, as far as that is possible without its networks.

    Reads the weights of the base, all data and, of a run that would be resumed, the newest policy. Returns what was
    found, by name. Raises SerlChunkError as the learner would.
    """
    begins = read_beginning(config, options, spec, agent, folder)
    saved = None if folder is None else next(CheckpointStore(folder).policies(), None)
    for known in filter(None, (saved, begins.start)):
        agent.check_base(known.meta["base_digest"])
        agent.load_params(known.params)
    preprocess = begins.preprocess
    if saved is not None:
        own = Preprocess.restored(config, spec, saved.meta, saved.normaliser)
        preprocess = restored_preprocess(own, preprocess, same_data=begins.data.dataset is None)
    replay = Replay(spec, config, preprocess, bc_on=config.imitated)
    data = OfflineData(replay, begins.data, seek=None, seen=ValueRange(config).demonstrations)
    try:
        if saved is None:  # one that is past its data goes on without a window in them
            data.check(config)
    finally:
        data.close()
    return {
        "weights": f"{agent.source}, digest {agent.base_digest}" if agent.source else "random",
        "tokenizer": tokens_digest(config) or "none",
        "statistics": f"normaliser.actions={preprocess.normaliser.mode}, digest {preprocess.digest()}",
        "data": f"{data.episodes} episodes, {replay.ready.demo} windows, digest {begins.demos.digest or 'none'}",
        "run": "a new one" if saved is None else f"resumed at step {saved.step}",
    }


def _starting_policy(config: ExperimentConfig) -> PolicyCheckpoint | None:
    """Return the policy of `learner.start_from`, if it is set. Raises ConfigError, CheckpointError."""
    if not config.learner.start_from:
        return None
    folder, _, step = config.learner.start_from.partition(":")
    path = Path(folder).expanduser()
    require(is_run(path), "learner.start_from", f"{folder} is no run folder. Give the --checkpoint_path of a run")
    start = wanted_policy(path, CheckpointStore(path), step or "latest")
    now, before = config.normaliser.actions, start.meta["normaliser_mode"]
    require(now == before, "learner.start_from",
        f"the policy of {folder} was trained with normaliser.actions={before}, and this run has {now}. Set it to "
        f"{before}, or start from another run")  # fmt: skip
    return start


def _preprocess(
    config: ExperimentConfig, spec: RobotSpec, folder: Path | None, episodes: Sequence[Episode],
    start: PolicyCheckpoint | None,
) -> Preprocess:  # fmt: skip
    """Return that of the policy to `start` from, or one fitted to the data.

    Where that is impossible it is that of a resumed run, which it keeps in any case.
    """
    if start is not None:
        return Preprocess.restored(config, spec, start.meta, start.normaliser)
    try:
        return fit_preprocess(config, spec, episodes)
    except (ConfigError, DataError) as error:
        saved = None if folder is None else next(CheckpointStore(folder).policies(), None)
        if saved is None or saved.meta["normaliser_mode"] != config.normaliser.actions:
            raise
        logger.info(f"the run's own normaliser goes on; a new one could not be fitted: {error}")
        return Preprocess.restored(config, spec, saved.meta, saved.normaliser)

"""`--learner`: the training process; with `--online_steps 0` without a network, on demonstrations alone."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from threading import Event

from serl_chunk.agents.registry import make_agent
from serl_chunk.cli.demos import RunOptions, append_hint, check_data, open_dataset, read_demos
from serl_chunk.cli.keys import invite_first, learner_keys
from serl_chunk.cli.process import print_config, spec_of
from serl_chunk.config.compatibility import contract
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.overrides import to_dict
from serl_chunk.data.preprocess import Preprocess, fit_preprocess
from serl_chunk.data.prompts import tokens_digest
from serl_chunk.evaluation.by_learner import OwnEvaluation, check_simulator
from serl_chunk.io import os_reason
from serl_chunk.learner.learner import Learner, check_replay_memory
from serl_chunk.learner.offline_data import InitialData
from serl_chunk.learner.publisher import Publish
from serl_chunk.learner.service import LearnerService
from serl_chunk.logs import log_to_file, status_line
from serl_chunk.replay.memory import replay_size
from serl_chunk.runs.checkpoints import CheckpointStore
from serl_chunk.runs.demos import DEMOS, note_of
from serl_chunk.runs.folder import RunFolder, open_run, write_json
from serl_chunk.runs.metrics import MetricsLog
from serl_chunk.runs.report.report import build_report
from serl_chunk.runs.status_line import StatusLine
from serl_chunk.signals import GRACE, TELLING, before_exit, exit_at_once_while, never, stop_on_signals
from serl_chunk.transport.sockets import check_port
from serl_chunk.types import ConfigError, DataError, Episode, RobotSpec
from serl_chunk_robot.wire.sockets import is_loopback

logger = logging.getLogger(__name__)

LOG = "learner.log"  # in the run folder
STOPPING = "ending with a final checkpoint"
STOPPED = "the learner was stopped"  # the reason that actors receive


def build_learner(
    config: ExperimentConfig,
    options: RunOptions,
    run: RunFolder,
    spec: RobotSpec,
    *,
    publish: Publish,
    threaded: bool,
    stopping: Callable[[], bool] = lambda: False,
) -> Learner:
    """Build the learner of a run with data, metrics and checkpoint; the caller closes it. Raises SerlChunkError."""
    check_simulator(config)
    agent = make_agent(config, spec)
    check_replay_memory(config, spec, agent)  # before data are read and networks compiled
    demo_options = options.demo_options.of_robot(config.robot)
    demos = read_demos(config, spec, options.demo_paths, demo_options)
    dataset = open_dataset(config, spec, demo_options, CheckpointStore(run.path).newest() or 0)
    data = InitialData(demos.episodes, dataset)
    try:
        data.require(config.learner)
    except ConfigError as error:
        raise ConfigError(append_hint(str(error), config)) from error
    # Nothing here keeps the shard: the learner takes it out of the data set, and later ones need its room.
    fitted = [*demos.episodes, *(dataset.episodes if dataset is not None else ())]
    preprocess = _preprocess(config, spec, run, fitted)
    del fitted
    metrics = MetricsLog(
        run.path, wandb_project="serl-chunk" if options.wandb else None, wandb_name=f"{config.name}-{run.path.name}",
        config=to_dict(config),
    )  # fmt: skip
    evaluate: OwnEvaluation | None = None
    with contextlib.ExitStack() as failed:
        failed.callback(metrics.close)  # wandb would wait for this run's end
        if config.learner.eval_interval:
            evaluate = OwnEvaluation(config, agent, stopping)
            failed.callback(evaluate.close)
        learner = Learner(
            config, spec, agent, preprocess, data, metrics, publish=publish, threaded=threaded, evaluate=evaluate
        )
        run.write_config()  # not before: until then the files of the previous process stay
        try:
            write_json(run.path / DEMOS, note_of(demos, demo_options.options))
        except OSError as error:
            raise ConfigError(f"{run.path / DEMOS} cannot be written: {os_reason(error)}") from error
        failed.pop_all()
    logger.info(replay_size(config, learner.replay.estimated_bytes))
    return learner


def _preprocess(config: ExperimentConfig, spec: RobotSpec, run: RunFolder, episodes: Sequence[Episode]) -> Preprocess:
    """Return one fitted to the data; where that is impossible that of a resumed run, which it keeps in any case."""
    try:
        return fit_preprocess(config, spec, episodes)
    except (ConfigError, DataError) as error:
        saved = next(CheckpointStore(run.path).policies(), None)
        if saved is None or saved.meta["normaliser_mode"] != config.normaliser.actions:
            raise
        logger.info(f"the run's own normaliser goes on; a new one could not be fitted: {error}")
        return Preprocess.restored(config, spec, saved.meta, saved.normaliser)


def prepare(config: ExperimentConfig, options: RunOptions) -> RobotSpec:
    """Log the effective settings and check that the data exist; returns the robot's specification."""
    spec = spec_of(config)
    print_config(config, spec)
    check_data(config, options.demo_paths, options.demo_options)
    return spec


@contextlib.contextmanager
def locked_run(
    config: ExperimentConfig, spec: RobotSpec, checkpoint_path: str | None
) -> Iterator[tuple[RunFolder, StatusLine, contextlib.ExitStack]]:
    """Open and lock a run's folder, with its log file and a status line; the stack that is yielded ends before them."""
    run = open_run(config, spec, checkpoint_path)
    before_exit(run.discard_fresh)
    with status_line() as status, contextlib.ExitStack() as stack:
        stack.enter_context(run.locked())
        log_to_file(run.path / LOG)
        yield run, status, stack


def run_learner(
    config: ExperimentConfig, options: RunOptions, *, bind: str, port: int, insecure: bool, keys: str | None = None
) -> int:
    """Train until `max_steps` or a signal, then write the last checkpoint and the report. `keys`: the key folder."""
    check_port(port)
    spec = prepare(config, options)
    agent = make_agent(config, spec)  # first: where it is refused there is no folder yet
    with locked_run(config, spec, options.checkpoint_path) as (run, status, stack):
        server_keys = learner_keys(bind, keys, insecure=insecure)
        digests = {"base": agent.base_digest, "tokens": tokens_digest(config)}
        shared = contract(config, spec, agent.network_shape(), **digests)
        service = LearnerService(config, run, shared, bind=bind, port=port, insecure=insecure, keys=server_keys)
        stack.callback(service.close)
        if insecure and not is_loopback(bind):
            logger.warning(f"--insecure: any machine that reaches {bind}:{port} can feed and read this run")
        stop, started = Event(), Event()
        stop_on_signals(stop, STOPPING, started.is_set)
        service.server.start()
        if server_keys is not None:
            invite_first(server_keys, bind, port)
        publish = service.server.publish
        learner = build_learner(config, options, run, spec, publish=publish, threaded=True, stopping=stop.is_set)
        stack.callback(learner.metrics.close)
        stack.callback(learner.close)
        service.attach(learner)
        logger.info(f"listening on {bind}:{port} (and the two ports after it); run folder {run.path}")
        started.set()

        def tell_actors() -> None:
            service.server.finish(STOPPED)
            time.sleep(TELLING)

        def tick() -> None:
            if service.tick():
                status.update(str(learner.trainer.phase), service.status())

        before_exit(tell_actors)
        _train(learner, stop, tick)
        status.update(str(learner.trainer.phase), service.status())
        service.finish("training is complete" if learner.trainer.done else STOPPED)
        _log_final_checkpoint(learner)
    return finish_run(learner)


def run_offline(config: ExperimentConfig, options: RunOptions, *, threaded: bool) -> int:
    """Train until `offline_steps` or a signal, then write the last checkpoint and the report."""
    stop, started = Event(), Event()
    stop_on_signals(stop, STOPPING, started.is_set)
    return finish_run(train_offline(config, options, stop=stop, started=started, threaded=threaded))


def train_offline(
    config: ExperimentConfig,
    options: RunOptions,
    *,
    stop: Event | None = None,
    started: Event | None = None,
    threaded: bool = False,
) -> Learner:
    """Train until `offline_steps` or `stop`, and return the closed learner; raises as `build_learner`.

    `started` is set as soon as `stop` is polled. A seed reproduces a run unless batches are `threaded`.
    """
    stop, started = stop or Event(), started or Event()
    spec = prepare(config, options)
    with locked_run(config, spec, options.checkpoint_path) as (run, status, stack):
        learner = build_learner(
            config, options, run, spec, publish=lambda *_: None, threaded=threaded, stopping=stop.is_set
        )
        stack.callback(learner.metrics.close)
        stack.callback(learner.close)
        logger.info(f"offline only, without a network; run folder {run.path}")
        started.set()

        def show() -> None:
            status.update(str(learner.trainer.phase), learner.status())

        _train(learner, stop, show)
        show()
        _log_final_checkpoint(learner)
    return learner


def _train(learner: Learner, stop: Event, tick: Callable[[], None]) -> None:
    exit_at_once_while(lambda: not learner.has_trained, GRACE)  # its first update is being compiled
    learner.run(stop, tick)
    exit_at_once_while(never)


def _log_final_checkpoint(learner: Learner) -> None:
    nothing = f"stopped during {learner.trainer.phase}: nothing to write"
    logger.info("writing the last checkpoint" if learner.writes_checkpoint else nothing)


def finish_run(learner: Learner) -> int:
    """Log a closed learner's totals and write its report; returns 1 where something could not be written, else 0."""
    path, status = learner.checkpoints.run_dir, 0
    logger.info(f"{learner.updates} updates, {learner.env_steps} online steps, {learner.human_ticks} human ticks")
    logger.info("writing the report")  # which takes seconds, on a busy machine many of them
    try:
        logger.info(f"report: {build_report(path)}")
    except OSError as error:  # a full disk: the checkpoints' fate below is worth more than a traceback
        logger.warning(f"the report could not be written ({os_reason(error)}); later: serl-chunk report {path}")
        status = 1
    if failed := learner.checkpoints.failed_saves + learner.timed_checkpoints.failed_saves:
        newest = learner.checkpoints.steps()[-1:] or "none"
        logger.warning(f"{failed} checkpoints could not be written; newest: {newest}")
        return 1
    return status

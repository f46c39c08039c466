"""`--learner`: the training process; with `--online_steps 0` without a network, on demonstrations alone."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from serl_chunk.agents.registry import make_agent
from serl_chunk.cli.demos import DemoOptions, append_hint, check_data, open_dataset, read_demos
from serl_chunk.cli.keys import invite_first, learner_keys
from serl_chunk.cli.learner_evaluation import OwnEvaluation, check_simulator
from serl_chunk.cli.logs import log_to_file, status_line
from serl_chunk.cli.process import print_config, spec_of
from serl_chunk.cli.signals import GRACE, TELLING, before_exit, exit_at_once_while, never, stop_on_signals
from serl_chunk.config.compatibility import contract
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.overrides import to_dict
from serl_chunk.data.normalise.normaliser import Normaliser, fit_normaliser
from serl_chunk.io import os_reason
from serl_chunk.learner.checks import check_replay_memory
from serl_chunk.learner.learner import Learner
from serl_chunk.learner.offline_data import InitialData
from serl_chunk.learner.publisher import Publish
from serl_chunk.learner.service import LearnerService
from serl_chunk.replay.memory import replay_size
from serl_chunk.runs.checkpoints import CheckpointStore
from serl_chunk.runs.demos import DEMOS, note_of
from serl_chunk.runs.folder import RunFolder, open_run, write_json
from serl_chunk.runs.metrics import MetricsLog
from serl_chunk.runs.report import build_report
from serl_chunk.runs.status_line import StatusLine
from serl_chunk.transport.sockets import check_port, is_loopback
from serl_chunk.types import ConfigError, DataError, Episode, RobotSpec, Snapshot

logger = logging.getLogger(__name__)

LOG = "learner.log"  # in the run folder
STOPPING = "ending with a final checkpoint"
STOPPED = "the learner was stopped"  # the reason that actors receive


def build_learner(
    config: ExperimentConfig,
    demo_paths: Sequence[str],
    run: RunFolder,
    spec: RobotSpec,
    *,
    publish: Publish,
    threaded: bool,
    wandb: bool,
    demo_options: DemoOptions = DemoOptions(),  # noqa: B008 (immutable)
    stopping: Callable[[], bool] = lambda: False,
) -> Learner:
    """Build the learner of a run with its data, metrics and (on resume) its checkpoint; the caller closes both.

    `stopping`: whether the process is to end; polled by what takes long. Raises ConfigError, DataError or
    CheckpointError.
    """
    check_simulator(config)
    agent = make_agent(config, spec)
    check_replay_memory(config, spec, agent)  # before data are read and networks compiled
    demo_options = demo_options.of_robot(config.robot)
    demos = read_demos(config, spec, demo_paths, demo_options)
    dataset = open_dataset(config, spec, demo_options, CheckpointStore(run.path).newest() or 0)
    data = InitialData(demos.episodes, dataset)
    try:
        data.require(config.learner)
    except ConfigError as error:
        raise ConfigError(append_hint(str(error), config)) from error
    # Nothing here keeps the shard: the learner takes it out of the data set, and later ones need its room.
    fitted = [*demos.episodes, *(dataset.episodes if dataset is not None else ())]
    normaliser = _normaliser(config, spec, run, fitted)
    del fitted
    metrics = MetricsLog(
        run.path, wandb_project="serl-chunk" if wandb else None, wandb_name=f"{config.name}-{run.path.name}",
        config=to_dict(config),
    )  # fmt: skip
    evaluate: OwnEvaluation | None = None
    try:
        if config.learner.eval_interval:
            evaluate = OwnEvaluation(config, agent, stopping)
        learner = Learner(
            config, spec, agent, normaliser, data, metrics, publish=publish, threaded=threaded, evaluate=evaluate
        )
        run.write_config()  # not before: until then the files of the previous process stay
        try:
            write_json(run.path / DEMOS, note_of(demos, demo_options.options))
        except OSError as error:
            raise ConfigError(f"{run.path / DEMOS} cannot be written: {os_reason(error)}") from error
    except BaseException:
        metrics.close()  # wandb would wait for this run's end
        if evaluate is not None:
            evaluate.close()
        raise
    logger.info(replay_size(config, learner.replay.estimated_bytes))
    return learner


def _normaliser(config: ExperimentConfig, spec: RobotSpec, run: RunFolder, episodes: Sequence[Episode]) -> Normaliser:
    """Fitted to what there is; where that cannot be, a resumed run's own, which it keeps in any case."""
    try:
        return fit_normaliser(spec, config.normaliser, config.chunk.carried, episodes)
    except (ConfigError, DataError) as error:
        saved = next(CheckpointStore(run.path).policies(), None)
        if saved is None or saved.meta["normaliser_mode"] != config.normaliser.actions:
            raise
        logger.info(f"the run's own normaliser goes on; a new one could not be fitted: {error}")
        return Normaliser.from_arrays(saved.meta["normaliser_mode"], saved.normaliser)


@contextlib.contextmanager
def locked_run(run: RunFolder) -> Iterator[tuple[StatusLine, contextlib.ExitStack]]:
    """Lock the folder of a run, with its log file and a status line; yields that and a stack that ends before them."""
    with status_line() as status, contextlib.ExitStack() as stack:
        stack.enter_context(run.locked())
        log_to_file(run.path / LOG)
        yield status, stack


def run_learner(
    config: ExperimentConfig,
    demo_paths: Sequence[str],
    checkpoint_path: str | None,
    *,
    bind: str,
    port: int,
    insecure: bool,
    wandb: bool,
    keys: str | None = None,
    demo_options: DemoOptions = DemoOptions(),  # noqa: B008 (immutable)
) -> int:
    """Train until `max_steps` or a signal, then write the last checkpoint and the report.

    `keys`: the key folder, where it is not the default one. A learner that other machines reach makes what it lacks.
    `demo_options`: how the demonstrations are read.
    """
    check_port(port)
    spec = spec_of(config)
    print_config(config, spec)
    check_data(config, demo_paths, demo_options)
    agent = make_agent(config, spec)  # first: where it is refused there is no folder yet
    run = open_run(config, spec, checkpoint_path)
    before_exit(run.discard_fresh)
    with locked_run(run) as (status, stack):
        server_keys = learner_keys(bind, keys, insecure=insecure)
        shared = contract(config, spec, agent.network_shape())
        service = LearnerService(config, run, shared, bind=bind, port=port, insecure=insecure, keys=server_keys)
        stack.callback(service.close)
        if insecure and not is_loopback(bind):
            logger.warning(f"--insecure: any machine that reaches {bind}:{port} can feed and read this run")
        stop, started = threading.Event(), threading.Event()
        stop_on_signals(stop, STOPPING, started.is_set)
        service.server.start()
        if server_keys is not None:
            invite_first(server_keys, bind, port)
        learner = build_learner(
            config, demo_paths, run, spec,
            publish=service.server.publish, threaded=True, wandb=wandb, demo_options=demo_options, stopping=stop.is_set,
        )  # fmt: skip
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
        exit_at_once_while(lambda: not learner.has_trained, GRACE)  # its first update is being compiled
        learner.run(stop, tick)
        exit_at_once_while(never)
        status.update(str(learner.trainer.phase), service.status())
        service.finish("training is complete" if learner.trainer.done else STOPPED)
        log_final_checkpoint(learner)
    return finish_run(learner)


def run_offline(config: ExperimentConfig, demo_paths: Sequence[str], run: str | None, **options: Any) -> int:
    """Train until `offline_steps` or a signal, then write the last checkpoint and the report.

    `run`: its folder. `options`: `wandb`, `threaded` and `demo_options` of `train_offline`.
    """
    return finish_run(train_offline(config, demo_paths, run, signals=True, **options))


def train_offline(
    config: ExperimentConfig,
    demo_paths: Sequence[str],
    checkpoint_path: str | None,
    *,
    stop: threading.Event | None = None,
    signals: bool = False,
    wandb: bool = False,
    threaded: bool = False,
    demo_options: DemoOptions = DemoOptions(),  # noqa: B008 (immutable)
) -> Learner:
    """Train until `offline_steps`, `stop` or, with `signals`, a signal; returns the closed learner.

    `threaded`: batches are prepared in parallel to the training thread; without, a seed reproduces a run. Raises as
    `build_learner`.
    """
    stop = stop or threading.Event()
    spec = spec_of(config)
    print_config(config, spec)
    check_data(config, demo_paths, demo_options)
    run = open_run(config, spec, checkpoint_path)
    with locked_run(run) as (status, stack):
        started = threading.Event()
        if signals:
            stop_on_signals(stop, STOPPING, started.is_set)
            before_exit(run.discard_fresh)
        learner = build_learner(
            config, demo_paths, run, spec,
            publish=_to_no_actor, threaded=threaded, wandb=wandb, demo_options=demo_options, stopping=stop.is_set,
        )  # fmt: skip
        stack.callback(learner.metrics.close)
        stack.callback(learner.close)
        logger.info(f"offline only, without a network; run folder {run.path}")
        started.set()
        if signals:
            exit_at_once_while(lambda: not learner.has_trained, GRACE)
        learner.run(stop, lambda: status.update(str(learner.trainer.phase), learner.status()))
        exit_at_once_while(never)
        status.update(str(learner.trainer.phase), learner.status())
        log_final_checkpoint(learner)
    return learner


def _to_no_actor(snapshot: Snapshot, info: dict[str, Any]) -> None: ...


def log_final_checkpoint(learner: Learner) -> None:
    """Log whether closing a learner writes a checkpoint."""
    nothing = f"stopped during {learner.trainer.phase}: nothing to write"
    logger.info("writing the last checkpoint" if learner.writes_checkpoint else nothing)


def finish_run(learner: Learner) -> int:
    """Log a closed learner's totals and write its report; returns 1 where something could not be written, else 0."""
    path = learner.checkpoints.run_dir
    logger.info(f"{learner.updates} updates, {learner.env_steps} online steps, {learner.human_ticks} human ticks")
    status = 0
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

"""`--learner`: the training process; with `--online_steps 0` without a network, on demonstrations alone."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from threading import Event

from serl_chunk.agents.base import Agent
from serl_chunk.agents.registry import make_agent
from serl_chunk.cli.keys import addresses, invite_first, learner_keys
from serl_chunk.cli.memory import show_memory
from serl_chunk.cli.process import print_config
from serl_chunk.config.compatibility import contract
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.robots import GymConfig
from serl_chunk.data.prompts import tokens_digest
from serl_chunk.evaluation.by_learner import OwnEvaluation, check_simulator
from serl_chunk.evaluation.open_loop import CheckOfLearner
from serl_chunk.io import os_reason
from serl_chunk.learner.building import RunOptions, build_learner, check_beginning
from serl_chunk.learner.devices import Devices
from serl_chunk.learner.learner import Learner, Publish, check_replay_memory
from serl_chunk.learner.memory import check_fits, learner_memory, memory_limit
from serl_chunk.learner.offline_data import check_data
from serl_chunk.learner.processes import Follower, Leader, Processes
from serl_chunk.learner.prometheus import MetricsPage
from serl_chunk.learner.service import LearnerService
from serl_chunk.learner.trainers.iterations import tasks_of_groups
from serl_chunk.logs import log_to_file, status_line
from serl_chunk.outcomes.robot import spec_of
from serl_chunk.robots.base import RobotEnv
from serl_chunk.robots.registry import make_env
from serl_chunk.runs.folder import RunFolder, open_run
from serl_chunk.runs.report.report import build_report
from serl_chunk.runs.status_line import StatusLine
from serl_chunk.signals import (
    GRACE,
    TELLING,
    before_exit,
    end_at_once,
    exit_at_once_while,
    never,
    signalled,
    stop_on_signals,
)
from serl_chunk.transport.wire.handshake import ADDRESS, check_port, write_address
from serl_chunk.types import RobotSpec
from serl_chunk.viewer.run_page import RunPageProcess
from serl_chunk_robot.wire.sockets import is_loopback

logger = logging.getLogger(__name__)

LOG = "learner.log"  # in the run folder
STOPPING = "ending with a final checkpoint"
STOPPED = "the learner was stopped"  # the reason that actors receive


def make_learner(
    config: ExperimentConfig, options: RunOptions, run: RunFolder, spec: RobotSpec, *, publish: Publish, threaded: bool,
    stopping: Callable[[], bool] = lambda: False, agent: Agent | None = None, devices: Devices | None = None,
) -> Learner:  # fmt: skip
    """Build the learner of a run with its check and its own evaluations, which end once it is `stopping`."""
    check_simulator(config)
    evaluation = partial(OwnEvaluation, config, stopping=stopping, n_envs=options.n_envs)
    return build_learner(
        config, options, run, spec, publish=publish, threaded=threaded, evaluation=evaluation, agent=agent,
        check=CheckOfLearner(config, spec), tasks=_tasks_of(config), devices=devices,
    )  # fmt: skip


def _tasks_of(config: ExperimentConfig) -> Mapping[str, Sequence[str]]:
    """Return the robot's tasks, and the ids of the states that it can begin each in where `group.init_states` is saved.

    Of a real robot it is a fake environment that is asked: no device is opened here.
    """
    robot = config.robot
    known = dict.fromkeys(robot.tasks, ())
    if not config.agent.iterates or not (config.group.init_states == "saved" or isinstance(robot, GymConfig)):
        return known
    if robot.server:
        return known
    if isinstance(robot, GymConfig):
        from serl_chunk.robots.gym_adapter import GymAdapter

        env: RobotEnv = GymAdapter(robot, fake_env=True)
    elif robot.real:
        return known
    else:
        env = make_env(robot)
    try:
        return {task: env.states_of(task) for task in env.tasks or (robot.task,)}
    finally:
        env.close()


def prepare(config: ExperimentConfig, options: RunOptions) -> RobotSpec:
    """Log the effective settings and check that the data exist; returns the robot's specification."""
    spec = spec_of(config)
    print_config(config, spec)
    check_data(config, options.demo_paths, options.demo_options)
    return spec


def check_device(config: ExperimentConfig, spec: RobotSpec, devices: Devices) -> None:
    """Raise ConfigError where the learner of a pi0 cannot fit into the memory of its devices."""
    if config.agent.as_pi0 is None:  # the others have megabytes, and tracing them takes a second
        return
    memory = learner_memory(config, spec, devices.count)
    check_fits(config, spec, memory, memory_limit(memory.replay), devices.count)


def dry_run(config: ExperimentConfig, options: RunOptions) -> int:
    """Print the memory that the learner will need, check all that it begins with, and end; no folder is made."""
    spec = prepare(config, options)
    if config.agent.iterates:
        tasks_of_groups(config, _tasks_of(config))
    agent = make_agent(config, spec)
    limit = memory_limit(check_replay_memory(config, spec, agent))
    devices = Devices(config).count
    check_fits(config, spec, show_memory(config, spec, limit, devices), limit, devices)
    folder = Path(options.checkpoint_path).expanduser() if options.checkpoint_path else None
    with contextlib.ExitStack() as stack:
        if folder is not None and folder.exists():
            stack.enter_context(open_run(config, spec, str(folder)).locked())
        found = check_beginning(config, options, spec, agent, folder)
    for name, value in found.items():
        logger.info(f"{name}: {value}")
    logger.info("dry run: the learner can be started")
    return 0


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


@contextlib.contextmanager
def leading(config: ExperimentConfig, processes: Processes | None) -> Iterator[Leader | None]:
    """Meet the other processes of this learner, if there are any; before any other use of JAX.

    Raises ConfigError where they do not come, or differ in their settings.
    """
    if processes is None:
        yield None
        return
    processes.check(config)
    processes.join()
    with contextlib.closing(Leader(processes, config, end_at_once)) as leader:
        yield leader


def follow(config: ExperimentConfig, processes: Processes) -> int:
    """Be one of a learner's processes other than 0, until that one ends the run."""
    processes.check(config)
    processes.join()
    follower = Follower(processes, config, end_at_once)
    stop_on_signals(follower.stop, "asking process 0 to end the run")
    exit_at_once_while(never)

    def prepare_programs() -> None:  # in the order of process 0
        agent = make_agent(config, spec_of(config))
        devices = Devices(config, together=follower)
        devices.adopt(agent)
        if (embed := agent.embedder({})) is not None:
            embed.compile(devices.compiled)
        logger.info(f"{processes.name} follows process 0")

    follower.follow(prepare_programs)
    logger.info(f"{processes.name}: the run ended")
    return 0


def run_learner(
    config: ExperimentConfig, options: RunOptions, *, bind: str, port: int, insecure: bool, keys: str | None = None,
    processes: Processes | None = None, metrics_port: str | None = None, run_page: int | None = None,
) -> int:  # fmt: skip
    """Train until `max_steps` or a signal, then write the last checkpoint and the report.

    Args:
        keys: the key folder.
        processes: that it is the first one of.
        metrics_port: see `MetricsPage`.
        run_page: port of `RunPage`.
    """
    check_port(port)
    spec = prepare(config, options)
    with contextlib.ExitStack() as outer:
        leader = outer.enter_context(leading(config, processes))
        agent = make_agent(config, spec)  # first: where it is refused there is no folder yet
        devices = Devices(config, together=leader)
        devices.adopt(agent)  # its base is read into where it is to lie
        check_device(config, spec, devices)
        run, status, stack = outer.enter_context(locked_run(config, spec, options.checkpoint_path))
        server_keys = learner_keys(bind, keys, insecure=insecure)
        digests = {"base": agent.base_digest, "tokens": tokens_digest(config)}
        shared = contract(config, spec, agent.network_shape(), **digests)
        service = LearnerService(config, run, shared, bind=bind, port=port, insecure=insecure, keys=server_keys)
        stack.callback(service.close)
        if insecure and not is_loopback(bind):
            logger.warning(f"--insecure: any machine that reaches {bind}:{port} can feed and read this run")
        stop, started = Event(), Event()
        stop_on_signals(stop, STOPPING, started.is_set)
        if leader is not None:
            leader.begin(run.path, stop)
        service.server.start()
        if server_keys is not None:
            invite_first(server_keys, bind, port)
        write_address(run.path / ADDRESS, addresses(bind)[0], port)
        publish = service.server.publish
        learner = make_learner(
            config, options, run, spec, publish=publish, threaded=True, stopping=stop.is_set, agent=agent,
            devices=devices,
        )  # fmt: skip
        stack.callback(learner.metrics.close)
        stack.callback(learner.close)
        service.attach(learner)
        if metrics_port is not None:
            page = MetricsPage(metrics_port, service.figures, service.actor_states)
            stack.callback(page.close)
            logger.info(f"figures for Prometheus at port {metrics_port}")
        if run_page is not None:
            of_run = RunPageProcess(run.path, run_page, service.figures)
            stack.callback(of_run.close)
            logger.info(f"page of the run: {of_run.url}")
        logger.info(f"listening on {bind}:{port}; run folder {run.path}")
        started.set()

        def tell_actors() -> None:
            if signalled():  # else another process is gone, and actors wait until the run goes on
                service.server.finish(STOPPED)
                time.sleep(TELLING)

        def tick() -> None:
            if service.tick():
                status.update(str(learner.trainer.phase), service.status())

        before_exit(tell_actors)
        _train(learner, stop, tick)
        service.finish("training is complete" if learner.trainer.done else STOPPED)
        status.update(str(learner.trainer.phase), service.status())  # with what actors had left to deliver
        _log_final_checkpoint(learner)
    return finish_run(learner)


def run_offline(
    config: ExperimentConfig, options: RunOptions, *, threaded: bool, processes: Processes | None = None
) -> int:
    """Train until `offline_steps` or a signal, then write the last checkpoint and the report."""
    stop, started = Event(), Event()
    stop_on_signals(stop, STOPPING, started.is_set)
    return finish_run(
        train_offline(config, options, stop=stop, started=started, threaded=threaded, processes=processes)
    )


def train_offline(
    config: ExperimentConfig, options: RunOptions, *, stop: Event | None = None, started: Event | None = None,
    threaded: bool = False, processes: Processes | None = None,
) -> Learner:  # fmt: skip
    """Train until `offline_steps` or `stop`, and return the closed learner; raises as `make_learner`.

    `started` is set as soon as `stop` is polled. A seed reproduces a run unless batches are `threaded`. `processes`:
    that it is the first one of.
    """
    stop, started = stop or Event(), started or Event()
    spec = prepare(config, options)
    with contextlib.ExitStack() as outer:
        leader = outer.enter_context(leading(config, processes))
        agent = make_agent(config, spec)
        devices = Devices(config, together=leader)
        devices.adopt(agent)
        check_device(config, spec, devices)
        run, status, stack = outer.enter_context(locked_run(config, spec, options.checkpoint_path))
        if leader is not None:
            leader.begin(run.path, stop)
        learner = make_learner(
            config, options, run, spec, publish=lambda *_: None, threaded=threaded, stopping=stop.is_set, agent=agent,
            devices=devices,
        )  # fmt: skip
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
    exit_at_once_while(lambda: not learner.stats.has_updated, GRACE)  # its first update is being compiled
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
    if failed := learner.checkpoints.failed_saves + learner.checkpoints.timed.failed_saves:
        newest = learner.checkpoints.steps()[-1:] or "none"
        logger.warning(f"{failed} checkpoints could not be written; newest: {newest}")
        return 1
    return status

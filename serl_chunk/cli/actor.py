"""`--actor`: the control loop on a robot PC, training with a learner."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from serl_chunk.actor.canary import check_signal
from serl_chunk.actor.link import open_link
from serl_chunk.actor.remote_policy import sent_cameras
from serl_chunk.actor.service import ActorService, ActorSummary, deliver
from serl_chunk.actor.turns import Turns, check_robot, check_tasks, take_turns
from serl_chunk.agents.base import Agent
from serl_chunk.agents.registry import make_agent
from serl_chunk.cli.console import check_operator, console_of, page_on
from serl_chunk.cli.keys import LearnerAddress
from serl_chunk.cli.process import check_many, warn_of_lockstep
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.fields import require
from serl_chunk.devices.registry import check_intervention
from serl_chunk.io import Waiting, format_bytes, plural
from serl_chunk.logs import log_to_file
from serl_chunk.outcomes.judge import Judge
from serl_chunk.outcomes.robot import spec_of
from serl_chunk.signals import drain_on_signal, exit_at_once_while, never, stop_on_signals
from serl_chunk.transport.client.link import LearnerLink
from serl_chunk.transport.storage.spool import SpoolFolders, largest_episode_bytes
from serl_chunk.transport.wire.handshake import RefusedError, Welcome

logger = logging.getLogger(__name__)


class Task(NamedTuple):
    """An experiment, and where its learner is."""

    config: ExperimentConfig
    address: LearnerAddress


class _Learner(NamedTuple):
    config: ExperimentConfig
    name: str  # of the actor there
    agent: Agent
    link: LearnerLink
    welcome: Welcome


def run_training_actor(
    config: ExperimentConfig, address: LearnerAddress, spool_path: str | None = None,
    *, viewer: str | None = None, n_envs: int = 1, undone_by: Task | None = None,
) -> int:  # fmt: skip
    """Collect episodes with the learner's newest policy until it is done or a signal comes.

    Args:
        spool_path: folder of records that the learner lacks.
        viewer: port of the live page.
        n_envs: environments whose episodes run at once.
        undone_by: a task in turns with this one, on the same robot; the end of one's session ends the other's.
    """
    check_intervention(config.actor.intervention)
    tasks = [Task(config, address)]
    if undone_by is not None:
        require(n_envs == 1, "n_envs", f"got {n_envs}, expected 1: two tasks in turns have one robot. Remove it")
        check_tasks(config, undone_by.config)
        # What a person sets up is confirmed each time: an episode that begins as the last one ended asks for nothing.
        config = dataclasses.replace(config, operator=dataclasses.replace(config.operator, ready="each"))
        tasks.append(undone_by)
    stop, drain = threading.Event(), threading.Event()
    connected = threading.Event()  # before it nothing is recorded, and nothing need be delivered
    spools: list[SpoolFolders] = []
    drain_on_signal(
        stop, drain, "closing the episode and waiting until the learner has all that is recorded",
        lambda: connected.is_set() or any(each.unsent() for each in spools),
    )  # fmt: skip
    tasks = [task._replace(address=task.address.found()) for task in tasks]
    names = [task.address.credentials() for task in tasks]
    warn_of_lockstep(config)
    stop_on_signals(stop, "closing the episode and delivering what is recorded", connected.is_set)
    exit_at_once_while(never)  # an open robot is closed, however long it takes
    with page_on(viewer) as page, contextlib.ExitStack() as stack:  # the page before anything can move
        there, approve = check_operator(config, page), config.operator.approve
        alone = f"{approve} chunks need an operator, and there is none. Start it at a terminal, or with --viewer"
        require(not approve or there, "operator.approve", alone)
        spec = spec_of(config)
        check_many(config, spec, n_envs, page=page is not None)
        learners: list[_Learner] = []
        for task, (name, keys) in zip(tasks, names, strict=True):
            check_signal(task.config, operator=there)
            Judge(task.config, spec, compiled=False)
            agent = make_agent(task.config, spec)
            spool = SpoolFolders(task.config, name, None if spool_path is None else Path(spool_path).expanduser())
            spools.append(spool)
            stack.enter_context(naming_unsent(spool))
            largest = n_envs * largest_episode_bytes(spec, task.config, sent_cameras(task.config, spec))
            link = open_link(
                task.config, spec, agent, task.address.ip, task.address.port, name,
                spools=spool.open, largest_episode_bytes=largest, keys=keys, address_file=task.address.file,
            )  # fmt: skip
            stack.callback(link.close)
            # Before the robot: an actor that no learner admits, as where another has its id, takes no robot from it.
            learners.append(_Learner(task.config, name, agent, link, link.connect(on_waiting=log_waiting())))
        log_to_file(spools[0].folder / "actor.log")
        if drain.is_set():  # for what a previous process recorded: the robot stays closed
            return 0 if all([deliver(learner.link, drain) for learner in learners]) else 1
        operators = stack.enter_context(contextlib.ExitStack())  # closed after the robot
        sides: list[ActorService] = []
        for learner in learners:
            sides.append(stack.enter_context(ActorService(
                learner.config, actor_id=learner.name, agent=learner.agent, link=learner.link, stop=stop,
                n_envs=n_envs, drain=drain, shares=sides[0] if sides else None,
            )))  # fmt: skip
        connected.set()
        if len(sides) > 1:
            check_robot(sides)
        turns = Turns(config.actor.attempts)
        amend = lambda record: sides[turns.side].amend(record)  # noqa: E731
        console = console_of(config, names[0][0], amend=amend, end=stop.set, page=page, spec=spec)
        operator = operators.enter_context(console)

        def notes_in(side: int) -> None:
            if operator is not None:
                operator.labels.notes = learners[side].link

        notes_in(0)
        for side, learner, spool in zip(sides, learners, spools, strict=True):
            if operator is not None:
                side.operator, operator.approval.number = operator, approve
            if inherited := int(learner.link.stats()["inherited"]):  # what is unacknowledged now may be none of it
                logger.info(f"spool {spool.folder}: {plural(inherited, 'record')} of a previous actor are sent")
            for folder, nbytes, _ in spool.unsent(but_open=True):
                logger.info(f"{folder} holds {format_bytes(nbytes)} of another run, for that run's learner")
        if len(sides) == 1:
            summaries = [sides[0].serve(learners[0].link, learners[0].welcome)]
        else:
            sessions = [side.sessions(of.link, of.welcome) for side, of in zip(sides, learners, strict=True)]
            summaries = take_turns(sides, sessions, turns, on_turn=notes_in)
    for side, summary in zip(sides, summaries, strict=True):
        report_session(summary, side.config, side.title)
    return 0 if all(summary.delivered for summary in summaries) else 1


@contextlib.contextmanager
def naming_unsent(spools: SpoolFolders) -> Iterator[None]:
    """Add to a refusal what stays in the spools, and which version wrote it."""
    try:
        yield
    except RefusedError as error:
        for folder, nbytes, version in spools.unsent():
            error.add_note(
                f"{folder} keeps {format_bytes(nbytes)} for the learner: --actor with serl_chunk {version} delivers it "
                "to a learner of that version, and so does a newer one that reads its format"
            )
        raise


def log_waiting(port: str = "--port") -> Callable[[str], None]:
    """A callable for `LearnerLink.connect` that logs why it waits, with the remedy once; `port`: the port's flag."""
    wait = Waiting(logger)
    remedy = f"Start the learner with --learner, or check --ip and {port}"
    return lambda reason: wait.log(reason, remedy if reason.startswith("no learner") else "")


def report_session(summary: ActorSummary, config: ExperimentConfig, title: str = "") -> None:
    """Log the totals of an actor's session; `title`: begins the line."""
    logger.info(
        f"{title}actor ended ({summary.reason}): {summary.episodes} episodes, {summary.steps} steps, "
        f"{summary.successes} successes, {summary.human_ticks} human ticks in {summary.segments} interventions, "
        f"{summary.waited_seconds:.0f} s waiting for the learner"
    )
    if config.actor.clock == "realtime":
        late = summary.lateness
        logger.info(
            f"lateness p50 {late.p50_ms:.2f} ms, p99 {late.p99_ms:.2f} ms, max {late.max_ms:.2f} ms; "
            f"{summary.starved_ticks} starved ticks"
        )

"""`--actor`: the control loop on a robot PC, training with a learner."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from serl_chunk.actor.canary import check_signal
from serl_chunk.actor.link import open_link
from serl_chunk.actor.remote_policy import sent_cameras
from serl_chunk.actor.service import ActorService, ActorSummary, deliver
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
from serl_chunk.transport.storage.spool import SpoolFolders, largest_episode_bytes
from serl_chunk.transport.wire.handshake import RefusedError

logger = logging.getLogger(__name__)


def run_training_actor(
    config: ExperimentConfig, address: LearnerAddress, spool_path: str | None = None,
    *, viewer: str | None = None, n_envs: int = 1,
) -> int:  # fmt: skip
    """Collect episodes with the learner's newest policy until it is done or a signal comes.

    Args:
        spool_path: folder of records that the learner lacks.
        viewer: port of the live page.
        n_envs: environments whose episodes run at once.
    """
    check_intervention(config.actor.intervention)
    stop, drain = threading.Event(), threading.Event()
    connected = threading.Event()  # before it nothing is recorded, and nothing need be delivered
    spools: SpoolFolders | None = None
    drain_on_signal(
        stop, drain, "closing the episode and waiting until the learner has all that is recorded",
        lambda: connected.is_set() or (spools is not None and bool(spools.unsent())),
    )  # fmt: skip
    address = address.found()
    actor_id, keys = address.credentials()
    warn_of_lockstep(config)
    stop_on_signals(stop, "closing the episode and delivering what is recorded", connected.is_set)
    exit_at_once_while(never)  # an open robot is closed, however long it takes
    with page_on(viewer) as page, contextlib.ExitStack() as stack:  # the page before anything can move
        there, approve = check_operator(config, page), config.operator.approve
        alone = f"{approve} chunks need an operator, and there is none. Start it at a terminal, or with --viewer"
        require(not approve or there, "operator.approve", alone)
        check_signal(config, operator=there)
        spec = spec_of(config)
        check_many(config, spec, n_envs, page=page is not None)
        Judge(config, spec, compiled=False)
        agent = make_agent(config, spec)
        spools = SpoolFolders(config, actor_id, None if spool_path is None else Path(spool_path).expanduser())
        stack.enter_context(naming_unsent(spools))
        largest = n_envs * largest_episode_bytes(spec, config, sent_cameras(config, spec))
        link = open_link(
            config, spec, agent, address.ip, address.port, actor_id,
            spools=spools.open, largest_episode_bytes=largest, keys=keys, address_file=address.file,
        )  # fmt: skip
        stack.callback(link.close)
        # Before the robot: an actor that no learner admits, as where another has its id, takes no robot from that one.
        welcome = link.connect(on_waiting=log_waiting())
        log_to_file(spools.folder / "actor.log")
        if drain.is_set():  # for what a previous process recorded: the robot stays closed
            return 0 if deliver(link, drain) else 1
        operators = stack.enter_context(contextlib.ExitStack())  # closed after the robot
        actor = stack.enter_context(
            ActorService(config, actor_id=actor_id, agent=agent, link=link, stop=stop, n_envs=n_envs, drain=drain)
        )
        connected.set()
        console = console_of(config, actor_id, amend=actor.amend, end=stop.set, page=page, spec=spec)
        operator = operators.enter_context(console)
        if operator is not None:
            actor.operator = operator
            operator.labels.notes, operator.approval.number = link, config.operator.approve
        if inherited := int(link.stats()["inherited"]):  # what is unacknowledged now may be none of it
            logger.info(f"spool {spools.folder}: {plural(inherited, 'record')} of a previous actor are sent")
        for folder, nbytes, _ in spools.unsent(but_open=True):
            logger.info(f"{folder} holds {format_bytes(nbytes)} of another run, for that run's learner")
        summary = actor.serve(link, welcome)
    report_session(summary, config)
    return 0 if summary.delivered else 1


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


def report_session(summary: ActorSummary, config: ExperimentConfig) -> None:
    """Log the totals of an actor's session."""
    logger.info(
        f"actor ended ({summary.reason}): {summary.episodes} episodes, {summary.steps} steps, "
        f"{summary.successes} successes, {summary.human_ticks} human ticks in {summary.segments} interventions, "
        f"{summary.waited_seconds:.0f} s waiting for the learner"
    )
    if config.actor.clock == "realtime":
        late = summary.lateness
        logger.info(
            f"lateness p50 {late.p50_ms:.2f} ms, p99 {late.p99_ms:.2f} ms, max {late.max_ms:.2f} ms; "
            f"{summary.starved_ticks} starved ticks"
        )

"""`--actor`: the control loop on a robot PC, training with a learner."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
import uuid
from pathlib import Path

from serl_chunk.actor.session import SAY_EVERY_SECONDS, ActorSummary, run_actor
from serl_chunk.agents.registry import make_agent
from serl_chunk.cli.keys import actor_keys, actor_name
from serl_chunk.cli.logs import log_to_file
from serl_chunk.cli.process import say, warn_of_lockstep
from serl_chunk.cli.signals import exit_at_once_while, never, stop_on_signals
from serl_chunk.config.compatibility import contract
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.data.normalise.normaliser import Normaliser
from serl_chunk.devices.registry import make_intervention
from serl_chunk.robots.registry import make_env
from serl_chunk.runs.spool_folders import SpoolFolders, largest_episode_bytes
from serl_chunk.transport.client.link import LearnerLink
from serl_chunk.transport.client.outbox import Spools
from serl_chunk.transport.security.keys import ClientKeys
from serl_chunk.transport.wire.handshake import Welcome
from serl_chunk.types import DataError, PolicyOrigin, RobotSpec

WELCOME_PERIOD = 0.2  # seconds between looks at a stop while the learner of another run is waited for


def run_training_actor(
    config: ExperimentConfig,
    *,
    ip: str,
    port: int,
    actor_id: str | None,
    spool_path: str | None = None,
    keys: str | None = None,
    insecure: bool = False,
) -> int:
    """Collect episodes with the learner's newest policy until it is done, Ctrl-C, SIGTERM or SIGHUP.

    `actor_id`: None for the name that the learner knows this machine's key by. `spool_path`: folder for what the
    learner does not have yet. `keys`: the key folder, where it is not the default one. `insecure`: use none.
    """
    own_keys = actor_keys(ip, keys, insecure=insecure)
    actor_id = actor_name(actor_id, own_keys, ip)
    warn_of_lockstep(config)
    stop = threading.Event()
    connected = threading.Event()  # before it nothing is recorded, and nothing need be delivered
    stop_on_signals(stop, "closing the episode and delivering what is recorded", connected.is_set)
    exit_at_once_while(never)  # an open robot is closed, however long it takes
    with contextlib.ExitStack() as stack:
        env = make_env(config.robot)
        stack.callback(env.close)
        intervention = make_intervention(config.actor.intervention, env)
        if intervention is not None:
            stack.callback(intervention.close)
        agent = make_agent(config, env.robot_spec)
        spools = SpoolFolders(config, actor_id, None if spool_path is None else Path(spool_path).expanduser())
        link, welcome = connect_to_learner(
            config, env.robot_spec, agent.network_shape(), ip, port, actor_id, None, spools.open,
            largest_episode_bytes(env.robot_spec, config), own_keys,
        )  # fmt: skip
        stack.callback(link.close)
        connected.set()
        log_to_file(spools.folder / "actor.log")
        if inherited := link.stats()["inherited"]:  # what is unacknowledged now may be none of it
            say(f"spool {spools.folder}: {inherited:.0f} records of an actor before this one are sent")
        for folder, nbytes in spools.left_behind():
            say(f"{folder} holds {nbytes / 2**20:.1f} MiB of another run, for that run's learner")
        while True:
            link.act_for(welcome.run)
            summary = run_actor(
                config,
                link,
                env,
                agent,
                normaliser_of(welcome),
                actor_id=actor_id,
                run=welcome.run,
                replaced=functools.partial(_replaced, link, welcome.origin),
                first_episode=int(welcome.fields["episodes"]),
                steps_before=int(welcome.fields["env_steps"]),
                human_ticks_before=int(welcome.fields.get("human_ticks", 0)),  # an older learner does not say
                episode_prefix=f"{actor_id}-{uuid.uuid4().hex[:8]}",
                cameras=config.agent.image_keys,
                intervention=intervention,
                stop=stop,
                say=say,
            )
            if not summary.replaced:
                break
            say(
                f"{summary.reason}: {summary.episodes} episodes, {summary.steps} steps are of the former. What "
                f"its learner lacks of them stays in {spools.folder / welcome.run}"
            )
            following = _next_welcome(link, stop) if _episodes_left(config, summary.episodes) else None
            if following is None:
                break
            welcome, config = following, _with_fewer_episodes(config, summary.episodes)
    report_session(summary, config)
    return 0 if summary.delivered else 1


def _episodes_left(config: ExperimentConfig, done: int) -> bool:
    return config.actor.max_episodes == 0 or done < config.actor.max_episodes


def _with_fewer_episodes(config: ExperimentConfig, done: int) -> ExperimentConfig:
    """`actor.max_episodes` less those that are done: the limit is of the process, whichever runs it serves."""
    left = max(0, config.actor.max_episodes - done)
    return dataclasses.replace(config, actor=dataclasses.replace(config.actor, max_episodes=left))


def _replaced(link: LearnerLink, origin: PolicyOrigin) -> str | None:
    """A sentence where the learner is no longer one whose snapshots are of `origin`."""
    if link.run != origin.run:
        return f"the learner is of run {link.run} now, it was of run {origin.run}"
    welcome = link.welcome
    if welcome is not None and welcome.origin != origin:
        now, before = welcome.origin.normaliser, origin.normaliser
        return f"the learner of run {origin.run} has normaliser {now} now, it had {before}"
    return None


def _next_welcome(link: LearnerLink, stop: threading.Event) -> Welcome | None:
    """Wait for the welcome of the learner that answers now; None for a stop before it. Raises the link's error."""
    say("the robot waits for that learner's welcome: policy, normaliser and counters will be those of its run")
    said = time.monotonic()
    while not stop.is_set():
        if link.wait_until(lambda: link.welcome is not None, WELCOME_PERIOD) and (welcome := link.welcome) is not None:
            return welcome
        if time.monotonic() - said >= SAY_EVERY_SECONDS:
            said = time.monotonic()
            say(link.waiting)
    return None


def report_session(summary: ActorSummary, config: ExperimentConfig) -> None:
    """What an actor's session came to, in a few lines."""
    say(
        f"actor ended ({summary.reason}): {summary.episodes} episodes, {summary.steps} steps, "
        f"{summary.successes} successes, {summary.human_ticks} human ticks in {summary.segments} interventions, "
        f"{summary.waited_seconds:.0f} s waiting for the learner"
    )
    if config.actor.clock == "realtime":
        late = summary.lateness
        say(
            f"lateness p50 {late.p50_ms:.2f} ms, p99 {late.p99_ms:.2f} ms, max {late.max_ms:.2f} ms; "
            f"{summary.starved_ticks} starved ticks"
        )


def normaliser_of(welcome: Welcome) -> Normaliser:
    """The learner's action transform, out of its welcome. Raises DataError where it is not the one announced there."""
    normaliser = Normaliser.from_arrays(str(welcome.fields["normaliser_mode"]), welcome.arrays)
    if normaliser.digest() != welcome.origin.normaliser:
        raise DataError(
            f"the learner's welcome names normaliser {welcome.origin.normaliser!r} and holds {normaliser.digest()}: "
            "install the same version of serl-chunk on both machines"
        )
    return normaliser


def connect_to_learner(
    config: ExperimentConfig,
    spec: RobotSpec,
    network: str,
    ip: str,
    port: int,
    actor_id: str,
    timeout: float | None,
    spools: Spools | None = None,
    largest_episode_bytes: int = 0,
    keys: ClientKeys | None = None,
) -> tuple[LearnerLink, Welcome]:
    """Connect; return the link and the learner's welcome. The link is closed where that fails.

    Args:
        timeout: seconds to wait for a learner; None waits for one without a limit.
        spools: opens the folder of records for a run; None for a link that sends none.

    Raises:
        RefusedError, UnreachableError: see `LearnerLink.connect`.
    """
    link = LearnerLink(
        config.transport,
        host=ip,
        port=port,
        actor_id=actor_id,
        contract=contract(config, spec, network),
        spools=spools,
        largest_episode_bytes=largest_episode_bytes,
        keys=keys,
    )
    try:
        return link, link.connect(timeout, on_waiting=say)
    except BaseException:
        link.close()
        raise

"""`--actor`: the control loop on a robot PC, training with a learner."""

from __future__ import annotations

import contextlib
import threading
import uuid
from pathlib import Path

from serl_chunk.actor.session import ActorSummary, run_actor
from serl_chunk.agents.registry import make_agent
from serl_chunk.cli.keys import actor_keys
from serl_chunk.cli.process import say, stop_on_signals, warn_of_lockstep
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
from serl_chunk.types import RobotSpec


def run_training_actor(
    config: ExperimentConfig,
    *,
    ip: str,
    port: int,
    actor_id: str,
    spool_path: str | None = None,
    keys: str | None = None,
    insecure: bool = False,
) -> int:
    """Collect episodes with the learner's newest policy until it is done, Ctrl-C or SIGTERM.

    `spool_path`: folder for what the learner does not have yet. `keys`: the key folder, where it is not the default
    one. `insecure`: use none.
    """
    own_keys = actor_keys(ip, keys, insecure=insecure)
    warn_of_lockstep(config)
    stop = threading.Event()
    connected = threading.Event()  # before it nothing is recorded, and nothing need be delivered
    stop_on_signals(stop, say, "closing the episode and delivering what is recorded", connected.is_set)
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
        if inherited := link.stats()["inherited"]:  # what is unacknowledged now may be none of it
            say(f"spool {spools.folder}: {inherited:.0f} records of an actor before this one are sent")
        for folder, nbytes in spools.left_behind():
            say(f"{folder} holds {nbytes / 2**20:.1f} MiB of another run, for that run's learner")
        summary = run_actor(
            config,
            link,
            env,
            agent,
            normaliser_of(welcome),
            actor_id=actor_id,
            first_episode=int(welcome.fields["episodes"]),
            steps_before=int(welcome.fields["env_steps"]),
            human_ticks_before=int(welcome.fields.get("human_ticks", 0)),  # an older learner does not say
            episode_prefix=f"{actor_id}-{uuid.uuid4().hex[:8]}",
            cameras=config.agent.image_keys,
            intervention=intervention,
            stop=stop,
            say=say,
        )
    report_session(summary, config)
    return 0 if summary.delivered else 1


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
    """The learner's action transform, out of its welcome."""
    return Normaliser.from_arrays(str(welcome.fields["normaliser_mode"]), welcome.arrays)


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

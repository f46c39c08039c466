"""`serl-chunk record` and `teleoperate`: demonstrations as HDF5 episodes, and the same by hand without a record."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import math
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from rich.progress import Progress

from serl_chunk.actor.policy import Policy
from serl_chunk.actor.remote_policy import remote_policy, sent_cameras
from serl_chunk.cli.console import console_of, page_on
from serl_chunk.cli.data.options import parse_cameras
from serl_chunk.cli.keys import LearnerAddress, add_learner_flags
from serl_chunk.cli.process import OF_THE_ACTOR, add_aliases, add_experiment_flags, check_many, load_flags
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.fields import require
from serl_chunk.config.operator import DEVICES
from serl_chunk.data.formats.hdf5 import open_episode, read_episode
from serl_chunk.data.formats.hdf5_io import close_files
from serl_chunk.data.formats.hdf5_writer import EpisodeWriter
from serl_chunk.data.source import ReadOptions
from serl_chunk.io import plural
from serl_chunk.logs import add_log_flags, quiet_libraries
from serl_chunk.outcomes.judge import OPERATOR
from serl_chunk.outcomes.robot import observing, spec_of
from serl_chunk.recording.ahead import AHEAD
from serl_chunk.recording.recording import (
    NothingKept,
    Recording,
    RecordingTotals,
    check_source,
    lets_human_in,
    open_human,
)
from serl_chunk.recording.stream import DemonstrationStream
from serl_chunk.robots.base import Expert, InterventionSource, RobotEnv
from serl_chunk.robots.registry import make_env, make_expert
from serl_chunk.signals import exit_at_once_while, never
from serl_chunk.types import DEMO_SEED_BASE, IMAGE_PREFIX, ConfigError, Outcome, RobotSpec

logger = logging.getLogger(__name__)


def record_flags(p: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    p.description = (
        "Record demonstrations as HDF5 episodes: of the robot's script, or by hand with the device of "
        "actor.intervention. Each episode by hand begins at the first motion, and each file is checked once it is "
        "written. The same command continues an interrupted recording."
    )
    p.add_argument("--exp_name", help="the experiment whose robot and task are recorded")
    p.add_argument("--n_demos", type=int, default=10, help="successful episodes the folder shall hold (default: 10)")
    p.add_argument("--out", required=True, metavar="DIR", help="folder for episode_0.hdf5, episode_1.hdf5, ...")
    p.add_argument("--policy", metavar="WHO", help="who demonstrates: scripted (default), human, or server "
                   "(actor.policy, the default where it is set)")  # fmt: skip
    p.add_argument(
        "--keep", default="successes", metavar="WHAT", help="of a human or server: successes (default), or all judged"
    )
    p.add_argument("--noise", type=float, help="standard deviation of the script's noise, radians")
    p.add_argument(
        "--n_envs", type=int, default=1, metavar="N",
        help="simulated robots at once, which wait for a policy server together (default: 1)",
    )  # fmt: skip
    p.add_argument("--cameras", metavar="A,B", help="cameras to record: names, all, or none (default: the agent's)")
    p.add_argument("--viewer", metavar="PORT", help="show the robot on a page at this port of this machine (0: any)")
    add_learner_flags(p, "also stream the successes into the running learner at this address")
    add_experiment_flags(p)
    add_aliases(p, OF_THE_ACTOR)
    add_log_flags(p)


def record_command(flags: argparse.Namespace) -> int:
    """Record, and stream to a learner where one is named; returns 1 where that lacks some. Raises as `run_record`."""
    config = load_flags(flags)
    spec, cameras = spec_of(config), config.agent.image_keys
    if flags.cameras is not None:
        cameras = recorded_cameras(flags.cameras, spec)
    policy = flags.policy or ("server" if config.actor.policy else "scripted")
    record = partial(
        run_record, config, flags.n_demos, flags.out,
        policy=policy, noise=flags.noise, cameras=cameras, keep=flags.keep, viewer=flags.viewer,
        n_envs=flags.n_envs,
    )  # fmt: skip
    if flags.ip is None:
        for name in ("port", "keys", "insecure", "actor_id", "spool_path"):
            require(not getattr(flags, name), name, "is of the learner that --ip names. Give --ip too, or remove it")
        return record()
    address = LearnerAddress.of(flags)
    if missing := [name for name in config.agent.image_keys if name not in cameras]:
        got = f"lacks {missing[0]!r}, which the learner trains on (got {', '.join(cameras) or 'none'})"
        raise ConfigError(f"{got}. Leave --cameras out, or --ip", parameter="cameras")
    quiet_libraries()
    return record_streaming(config, address, flags.spool_path, record)


def teleoperate_flags(p: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    p.description = (
        "Drive the robot with the device of actor.intervention, with the keys, holds, countdowns and resets of a "
        "recording by hand, and record nothing. --viewer shows its cameras; without a device the robot only holds. "
        "s, f or Backspace ends an episode, and the next one begins; q, q ends."
    )
    p.add_argument("--exp_name", help="the experiment whose robot is driven")
    p.add_argument("--cameras", metavar="A,B", default="all", help="cameras to show: names, all (default) or none")
    p.add_argument("--viewer", metavar="PORT", help="show the robot on a page at this port of this machine (0: any)")
    add_experiment_flags(p)
    add_log_flags(p)


def teleoperate_command(flags: argparse.Namespace) -> int:
    """Let a human drive; raises as `run_record`, and for what chooses a policy."""
    config = load_flags(flags)
    for name, given in (
        ("preset", flags.preset), ("compat", flags.compat), ("horizon_length", flags.horizon_length),
        ("actor.policy", config.actor.policy),
    ):  # fmt: skip
        require(not given, name, f"is of a policy, and a human drives (got {given!r}). Remove it")
    require(lets_human_in(config) or flags.viewer is not None, "actor.intervention",
        f"nothing drives the robot (got none, expected {', '.join(DEVICES)}, scripted or a file). Give a device, as "
        "--config.actor.intervention=spacemouse, or --viewer to look at its cameras while it holds")  # fmt: skip
    cameras = recorded_cameras(flags.cameras, spec_of(config))
    if not lets_human_in(config) and config.robot.real:
        # It is only looked at, perhaps from within the cell: it is not reset again and again by its time limit.
        config = dataclasses.replace(config, operator=dataclasses.replace(config.operator, ready="each"))
    return run_record(config, math.inf, None, policy="human", noise=None, cameras=cameras, viewer=flags.viewer)


def recorded_cameras(text: str, spec: RobotSpec) -> tuple[str, ...]:
    """Return the cameras that `--cameras` names. Raises ConfigError."""
    named = parse_cameras(text)
    cameras = tuple(c.name for c in spec.cameras) if named is None else named
    if twice := [c for i, c in enumerate(cameras) if c in cameras[:i]]:
        raise ConfigError(f"{twice[0]!r} is named twice. Remove one of them.", parameter="cameras")
    return cameras


def run_record(
    config: ExperimentConfig, n_demos: float, out: str | None, *, policy: str, noise: float | None,
    cameras: tuple[str, ...], keep: str = "successes", stream: DemonstrationStream | None = None,
    viewer: str | None = None, n_envs: int = 1,
) -> int:  # fmt: skip
    """Record until `out` holds `n_demos` successful episodes; an interrupted recording goes on where it stopped.

    Args:
        out: None: nothing is recorded, and `n_demos` is infinite. It ends by the operator's key.
        policy: "scripted", the robot's expert; "human"; or "server", the policy server of `actor.policy`.
        noise: standard deviation of the expert's noise, rad; None: its own.
        cameras: recorded at every tick, in addition to those that a policy server is sent.
        keep: "successes", or "all" episodes of a human or server that were judged, failures too.
        stream: takes each file that was checked and cannot be taken back any more; the caller closes it.
        viewer: port of the live page.
        n_envs: simulated robots of a policy server's episodes.

    Raises ConfigError, also for an expert that hardly ever succeeds and for files in `out` of another robot or without
    one of `cameras`, DataError for a damaged file there, DeviceError for a device that cannot be opened, and
    KeyboardInterrupt where the operator ends it.
    """
    _check(config, policy, n_demos, noise, keep)
    if policy == "human" and out is not None:
        check_source(config)
    folder = None if out is None else Path(out).expanduser()
    spec = spec_of(config)
    served = policy == "server"
    require(n_envs <= 1 or served, "n_envs",
        f"robots at once wait for a policy server together, and --policy={policy} waits for none (got {n_envs}, "
        "expected 1). Leave it out")  # fmt: skip
    if served:
        cameras = tuple(dict.fromkeys((*cameras, *sent_cameras(config, spec))))
        config = dataclasses.replace(config, actor=dataclasses.replace(config.actor, frames="every_tick"))
    for name in cameras:
        spec.camera(name)
    check_many(config, spec, n_envs, page=viewer is not None, served=served, cameras=cameras, episodes=AHEAD)
    seed, there = (DEMO_SEED_BASE, 0) if folder is None else held(folder, spec.name, cameras)
    if stream is not None and folder is not None:
        stream.start(folder)
    if there >= n_demos:
        logger.info(f"{folder} already holds {plural(there, 'demonstration')}")
        return 0
    exit_at_once_while(never)  # an open robot is closed, however long it takes
    outcomes = (Outcome.SUCCESS, Outcome.FAILURE) if keep == "all" else (Outcome.SUCCESS,)
    by_human, totals, ended = policy == "human", RecordingTotals(), threading.Event()
    with (
        page_on(viewer) as page,  # before anything can move
        contextlib.ExitStack() as files_stack,
        contextlib.ExitStack() as stack,  # the robot is closed first
    ):
        env = observing(make_env(config.robot), config)
        human: InterventionSource | None = None
        demonstrator: Expert | Policy | None = None
        with contextlib.ExitStack() as opened:
            opened.callback(env.close)
            if served:
                demonstrator = stack.enter_context(remote_policy(config, env.robot_spec, ended.is_set))
            if by_human and (human := open_human(config, env, seed - DEMO_SEED_BASE)) is not None:
                stack.callback(human.close)
            opened.pop_all()
        robot = stack.enter_context(contextlib.ExitStack())
        robot.callback(env.close)
        if not served and not by_human:
            demonstrator = _expert(env, noise)
        writer: EpisodeWriter | NothingKept = NothingKept()
        if folder is not None:
            writer = EpisodeWriter(
                folder, env.robot_spec, keep=lambda e: e.end.outcome in outcomes, sim=not config.robot.real
            )
            files_stack.enter_context(_kept_files_reported(folder, spec.name, there, n_demos))
            files_stack.enter_context(writer)
        console = console_of(
            config, "teleoperate" if folder is None else "record", amend=totals.amend, end=ended.set, page=page,
            spec=env.robot_spec,
            simulated=folder is None or (by_human and config.actor.intervention.lower() in DEVICES),
        )  # fmt: skip
        operator = stack.enter_context(console)
        if operator is None and folder is None:
            raise ConfigError("teleoperate ends by an operator's key. Start it at a terminal, or give --viewer")
        if operator is not None:
            operator.labels.notes = totals
        progress = None
        if operator is None and not by_human:
            bar = stack.enter_context(Progress(transient=True))
            task = bar.add_task(f"recording to {folder}", total=n_demos, completed=there)
            progress = lambda n: bar.update(task, completed=there + n)  # noqa: E731
        others = []
        for _ in range(n_envs - 1):
            robot.callback((other := observing(make_env(config.robot), config)).close)
            others.append((other, stack.enter_context(remote_policy(config, other.robot_spec, ended.is_set))))
        recording = Recording(
            env, demonstrator, human, writer, totals, config=config, cameras=cameras, number=n_demos, there=there,
            operator=operator, stop=lambda: OPERATOR if ended.is_set() else None, progress=progress, stream=stream,
            others=others,
        )  # fmt: skip
        stack.callback(recording.close)
        seen = f", with cameras {', '.join(cameras)}" if cameras else ""
        ends = lambda: f"{folder}: {totals.summary(human=by_human)}{seen}"  # noqa: E731
        if folder is None:
            ends = lambda: f"{plural(totals.attempts, 'episode')} driven, nothing recorded"  # noqa: E731
        stack.callback(lambda: logger.info(ends()))
        recording.run(seed)
        if ended.is_set():
            raise KeyboardInterrupt
        if operator is not None and operator.quits:
            robot.close()
            operator.park()
    return 0


def _check(config: ExperimentConfig, policy: str, n_demos: float, noise: float | None, keep: str) -> None:
    require(policy in ("scripted", "human", "server"), "policy", f"got {policy!r}, expected scripted, human or server")
    if (policy == "server") != bool(config.actor.policy):
        needs = "server needs the server's address. Give --config.actor.policy=openpi://HOST:PORT"
        other = f"is {policy}, and actor.policy names a policy server. Remove one of them"
        raise ConfigError(needs if policy == "server" else other, parameter="policy")
    require(n_demos >= 1, "n_demos", f"must be at least 1, got {n_demos}")
    require(keep in ("successes", "all"), "keep", f"got {keep!r}, expected successes or all")
    if policy == "human":
        require(noise is None, "noise", "is the expert's, and a human records. Remove it")
    elif policy == "server":
        require(noise is None, "noise", "is the expert's, and a policy server acts. Remove it")
    else:
        require(keep == "successes", "keep",
            "is for --policy=human or server: a script that fails is no demonstration. Remove it")  # fmt: skip


def _expert(env: RobotEnv, noise: float | None) -> Expert:
    expert = make_expert(env)
    if noise is not None:
        if not hasattr(expert, "noise"):
            raise ConfigError(f"the expert of {env.robot_spec.name!r} has no adjustable noise: leave --noise out")
        expert.noise = noise
    return expert


@contextlib.contextmanager
def _kept_files_reported(folder: Path, robot: str, there: int, n_demos: float) -> Iterator[None]:
    """Log what an interrupted recording leaves, once its files are written."""
    try:
        yield
    except KeyboardInterrupt:
        _, now = held(folder, robot, ())  # an interrupt may come between an episode's file and its count
        holds = f"{folder} holds {now} of {n_demos} demonstrations, {now - there} of them new"
        logger.info(f"interrupted: {holds}. Run the same command again to record the rest.")
        raise


def held(folder: Path, robot: str, cameras: Sequence[str]) -> tuple[int, int]:
    """Return the next start state, and how many demonstrations `folder` holds; failures are none."""
    files = list(folder.glob("episode_*.hdf5")) if folder.is_dir() else []
    starts, failures = [], 0  # what was not kept has no file, so that counting files would repeat some start states
    for file in files:
        begin, _, end = read_episode(file, cameras=())
        if begin.robot not in ("", robot):
            other = f"{folder} holds demonstrations of robot {begin.robot!r} ({file.name}), expected {robot!r}"
            raise ConfigError(f"{other}. Give another --out")
        if match := re.fullmatch(r"seed-(\d+)", begin.init_state):
            starts.append(int(match[1]))
        failures += end.outcome is Outcome.FAILURE
        if cameras:
            _check_cameras(file, cameras)
    return (max(starts) + 1 if starts else DEMO_SEED_BASE + len(files)), len(files) - failures


def _check_cameras(file: Path, cameras: Sequence[str]) -> None:
    try:
        seen = open_episode(file, ReadOptions()).steps.sparse
    finally:
        close_files(file)
    missing = [c for c in cameras if IMAGE_PREFIX + c not in seen]
    if missing:
        remedy = "Give another --out, remove these, or record without frames (--cameras none)"
        without = f"holds demonstrations without frames of camera {missing[0]!r} ({file.name})"
        raise ConfigError(f"{file.parent} {without}, and training takes all or none. {remedy}")


def record_streaming(
    config: ExperimentConfig, address: LearnerAddress, spool_path: str | None, record: Callable[..., int]
) -> int:
    """Call `record` with a `stream` to the learner at `address`; returns its status, 1 where the learner lacks some.

    Records on their way are kept in `spool_path`. Raises ConfigError.
    """
    from serl_chunk.actor.link import open_link
    from serl_chunk.agents.registry import make_agent
    from serl_chunk.recording.stream import DemonstrationStream
    from serl_chunk.transport.storage.spool import SpoolFolders, largest_episode_bytes

    name, keys = address.credentials()
    name = f"{name}-demonstrations"  # an id of its own: the same robot PC may be training meanwhile
    spec = spec_of(config)
    spools = SpoolFolders(config, name, None if spool_path is None else Path(spool_path).expanduser())
    link = open_link(
        config, spec, make_agent(config, spec), address.ip, address.port, name, spools=spools.open,
        largest_episode_bytes=largest_episode_bytes(spec, config), keys=keys, demonstrations=True,
    )  # fmt: skip
    stream = DemonstrationStream(link, tuple(config.agent.image_keys), spec, f"{address.ip}:{address.port}")
    wait = False
    try:
        status = record(stream=stream)
        wait = True
    finally:
        complete = stream.close(wait=wait)
    return status if complete else 1

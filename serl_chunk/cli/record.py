"""`serl-chunk record`: demonstrations of a script or a human as HDF5 episodes."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.progress import Progress

from serl_chunk.actor.episode import EpisodeRunner
from serl_chunk.actor.stats import RolloutStats
from serl_chunk.cli.process import spec_of
from serl_chunk.cli.record_human import (
    MAX_FAILURES_PER_DEMO,
    HumanRecording,
    NoRequests,
    Requests,
    Stream,
    check_source,
    open_human,
)
from serl_chunk.cli.signals import exit_at_once_while, never
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.data.formats.hdf5 import open_episode, read_episode
from serl_chunk.data.formats.hdf5_io import close_files
from serl_chunk.data.formats.hdf5_writer import EpisodeWriter
from serl_chunk.data.source import ReadOptions
from serl_chunk.io import plural
from serl_chunk.robots.base import Expert, InterventionSource, RobotEnv
from serl_chunk.robots.registry import make_env, make_expert
from serl_chunk.types import IMAGE_PREFIX, ConfigError, Outcome

logger = logging.getLogger(__name__)

DEMO_SEED_BASE = 0  # start states of demonstrations; evaluation's begin at 1,000,000


def run_record(
    config: ExperimentConfig, n_demos: int, out: str, *, policy: str, noise: float | None, cameras: tuple[str, ...],
    keep: str = "successes", requests: Requests = NoRequests(),  # noqa: B008 (without state)
    stream: Stream | None = None,
) -> int:  # fmt: skip
    """Record until `out` holds `n_demos` successful episodes; an interrupted recording goes on where it stopped.

    Args:
        policy: "scripted", the robot's expert, or "human".
        noise: standard deviation of the expert's noise, rad; None: its own.
        cameras: recorded at every tick.
        keep: "successes", or "all" episodes of a human that were judged, failures too.
        requests: of a human.
        stream: takes each file once it was written and checked; the caller closes it.

    Raises ConfigError, also for an expert that hardly ever succeeds and for files in `out` of another robot or without
    one of `cameras`, DataError for a damaged file there, and DeviceError for a device that cannot be opened.
    """
    _check(config, policy, n_demos, noise, keep)
    folder = Path(out).expanduser()
    spec = spec_of(config)
    for name in cameras:
        spec.camera(name)
    seed, there = _held(folder, spec.name, cameras)
    if stream is not None:
        stream.start(folder)
    if there >= n_demos:
        logger.info(f"{folder} already holds {plural(there, 'demonstration')}")
        return 0
    exit_at_once_while(never)  # an open robot is closed, however long it takes
    outcomes = (Outcome.SUCCESS, Outcome.FAILURE) if keep == "all" else (Outcome.SUCCESS,)
    with contextlib.ExitStack() as files_stack, contextlib.ExitStack() as stack:  # the robot is closed first
        env = make_env(config.robot)
        human: InterventionSource | None = None
        recording: HumanRecording | None = None
        with contextlib.ExitStack() as opened:
            opened.callback(env.close)
            if policy == "human" and (human := open_human(config, env, seed - DEMO_SEED_BASE)) is not None:
                stack.callback(human.close)
            opened.pop_all()
        stack.callback(env.close)
        demonstrator = _expert(env, noise) if policy == "scripted" else None
        writer = EpisodeWriter(
            folder, env.robot_spec, keep=lambda e: e.end.outcome in outcomes, sim=not config.robot.real
        )
        failures = lambda: 0 if recording is None else recording.totals.failures  # noqa: E731
        files_stack.enter_context(_kept_files_reported(writer, folder, there, n_demos, failures))
        files_stack.enter_context(writer)
        if demonstrator is None:
            recording = HumanRecording(
                env, human, writer,
                config=config, cameras=cameras, number=n_demos, there=there, requests=requests, stream=stream,
            )  # fmt: skip
            stack.callback(recording.close)
            totals = recording.totals
            stack.callback(lambda: logger.info(f"{folder}: {totals.summary()}{_seen(cameras)}"))
            recording.run(seed)
        else:
            runner = EpisodeRunner(env, demonstrator, writer, config=config, cameras=cameras)
            stack.callback(runner.close)
            progress = stack.enter_context(Progress(transient=True))
            task = progress.add_task(f"recording to {folder}", total=n_demos, completed=there)
            kept, attempts = _record_expert(
                runner,
                writer,
                n_demos - there,
                seed,
                lambda n: progress.update(task, completed=there + n),
                stream,
                failures=MAX_FAILURES_PER_DEMO * n_demos,
            )
            logger.info(
                f"{folder}: {plural(kept.episodes, 'demonstration')} recorded in {plural(attempts, 'episode')}, "
                f"{kept.mean_length:.0f} ticks on average{_seen(cameras)}"
            )
    return 0


def _check(config: ExperimentConfig, policy: str, n_demos: int, noise: float | None, keep: str) -> None:
    if policy not in ("scripted", "human"):
        raise ConfigError(f"got {policy!r}, expected scripted or human", parameter="policy")
    if n_demos < 1:
        raise ConfigError(f"must be at least 1, got {n_demos}", parameter="n_demos")
    if keep not in ("successes", "all"):
        raise ConfigError(f"got {keep!r}, expected successes or all", parameter="keep")
    if policy == "human":
        if noise is not None:
            raise ConfigError("is the expert's, and a human records. Remove it", parameter="noise")
        check_source(config)
    elif keep != "successes":
        raise ConfigError("is for --policy=human: a script that fails is no demonstration. Remove it", parameter="keep")


def _seen(cameras: Sequence[str]) -> str:
    return f", with cameras {', '.join(cameras)}" if cameras else ""


def _record_expert(
    runner: EpisodeRunner, writer: EpisodeWriter, wanted: int, seed: int, progress: Callable[[int], object],
    stream: Stream | None, *, failures: int,
) -> tuple[RolloutStats, int]:  # fmt: skip
    """Record `wanted` successes of an expert; returns them, and the number of episodes.

    Raises ConfigError after more than `failures` failures.
    """
    kept, attempts, streamed = RolloutStats(), 0, len(writer.written)
    while kept.episodes < wanted:
        summary = runner.run_episode(seed, episode_id=f"demo-{runner.spec.name}-{seed:06d}")
        writer.flush()  # a fast simulator would leave thousands of episodes waiting in memory
        if stream is not None:
            for file in writer.written[streamed:]:
                stream.add(file)
        streamed = len(writer.written)
        seed += 1
        attempts += 1
        if summary.success:
            kept.merge(summary)
            progress(kept.episodes)
        elif (failed := attempts - kept.episodes) > failures:
            raise ConfigError(f"the expert failed {failed} of {attempts} episodes; giving up")
    return kept, attempts


def _expert(env: RobotEnv, noise: float | None) -> Expert:
    expert = make_expert(env)
    if noise is not None:
        if not hasattr(expert, "noise"):
            raise ConfigError(f"the expert of {env.robot_spec.name!r} has no adjustable noise: leave --noise out")
        expert.noise = noise
    return expert


@contextlib.contextmanager
def _kept_files_reported(
    writer: EpisodeWriter, folder: Path, there: int, n_demos: int, failures: Callable[[], int]
) -> Iterator[None]:
    """Log what an interrupted recording leaves, once `writer` is closed."""
    try:
        yield
    except KeyboardInterrupt:
        new = len(writer.written) - failures()
        held = f"{folder} holds {there + new} of {n_demos} demonstrations, {new} of them new"
        logger.info(f"interrupted: {held}. Run the same command again to record the rest.")
        raise


def _held(folder: Path, robot: str, cameras: Sequence[str]) -> tuple[int, int]:
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

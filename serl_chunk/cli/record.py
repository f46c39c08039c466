"""`serl-chunk record`: scripted demonstrations as HDF5 episodes, successes only."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.progress import Progress

from serl_chunk.actor.episode import EpisodeRunner
from serl_chunk.actor.stats import RolloutStats
from serl_chunk.cli.process import spec_of
from serl_chunk.cli.signals import exit_at_once_while, never
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.data.formats.hdf5 import open_episode, read_episode
from serl_chunk.data.formats.hdf5_io import close_files
from serl_chunk.data.formats.hdf5_writer import EpisodeWriter
from serl_chunk.data.source import ReadOptions
from serl_chunk.io import plural
from serl_chunk.robots.base import Expert, RobotEnv
from serl_chunk.robots.registry import make_env, make_expert
from serl_chunk.types import IMAGE_PREFIX, ConfigError, Outcome

logger = logging.getLogger(__name__)

DEMO_SEED_BASE = 0  # start states of demonstrations; evaluation's begin at 1,000,000
MAX_FAILURES_PER_DEMO = 20  # an expert worse than this is a mistake, not bad luck


def run_record(
    config: ExperimentConfig, n_demos: int, out: str, *, policy: str, noise: float | None, cameras: tuple[str, ...]
) -> int:
    """Record until `out` holds `n_demos` successful episodes; an interrupted recording goes on where it stopped.

    `cameras` are recorded at every tick. `noise`: standard deviation of the expert's noise, rad; None: its own. Raises
    ConfigError, also for an expert that hardly ever succeeds and for files in `out` of another robot or without one of
    `cameras`, and DataError for a damaged file there.
    """
    if policy != "scripted":
        raise ConfigError(f"--policy={policy}: only scripted is there; recording by hand comes with device support")
    if n_demos < 1:
        raise ConfigError(f"--n_demos must be at least 1, got {n_demos}")
    folder = Path(out).expanduser()
    files = list(folder.glob("episode_*.hdf5")) if folder.is_dir() else []
    there = len(files)
    spec = spec_of(config)
    for name in cameras:
        spec.camera(name)
    seed = _next_seed(folder, files, spec.name, cameras)
    if there >= n_demos:
        logger.info(f"{folder} already holds {plural(there, 'demonstration')}")
        return 0
    exit_at_once_while(never)  # an open robot is closed, however long it takes
    with contextlib.ExitStack() as files_stack, contextlib.ExitStack() as stack:  # the robot is closed first
        env = stack.enter_context(contextlib.closing(make_env(config.robot)))
        expert = _expert(env, noise)
        writer = EpisodeWriter(
            folder, env.robot_spec, keep=lambda e: e.end.outcome is Outcome.SUCCESS, sim=not config.robot.real
        )
        files_stack.enter_context(_kept_files_reported(writer, folder, there, n_demos))
        files_stack.enter_context(writer)
        runner = EpisodeRunner(env, expert, writer, config=config, cameras=cameras)
        stack.callback(runner.close)
        kept, attempts = RolloutStats(), 0
        progress = stack.enter_context(Progress(transient=True))
        task = progress.add_task(f"recording to {folder}", total=n_demos, completed=there)
        while there + kept.episodes < n_demos:
            summary = runner.run_episode(seed, episode_id=f"demo-{env.robot_spec.name}-{seed:06d}")
            writer.flush()  # a fast simulator would leave thousands of episodes waiting in memory
            seed += 1
            attempts += 1
            if summary.success:
                kept.merge(summary)
                progress.update(task, completed=there + kept.episodes)
            elif (failed := attempts - kept.episodes) > MAX_FAILURES_PER_DEMO * n_demos:
                raise ConfigError(f"the expert failed {failed} of {attempts} episodes; giving up")
    seen = f", with cameras {', '.join(cameras)}" if cameras else ""
    logger.info(
        f"{folder}: {plural(kept.episodes, 'demonstration')} recorded in {plural(attempts, 'episode')}, "
        f"{kept.mean_length:.0f} ticks on average{seen}"
    )
    return 0


def _expert(env: RobotEnv, noise: float | None) -> Expert:
    expert = make_expert(env)
    if noise is not None:
        if not hasattr(expert, "noise"):
            raise ConfigError(f"the expert of {env.robot_spec.name!r} has no adjustable noise: leave --noise out")
        expert.noise = noise
    return expert


@contextlib.contextmanager
def _kept_files_reported(writer: EpisodeWriter, folder: Path, there: int, n_demos: int) -> Iterator[None]:
    """Print what an interrupted recording leaves, once `writer` is closed."""
    try:
        yield
    except KeyboardInterrupt:
        new = len(writer.written)
        held = f"{folder} holds {there + new} of {n_demos} demonstrations, {new} of them new"
        logger.info(f"interrupted: {held}. Run the same command again to record the rest.")
        raise


def _next_seed(folder: Path, files: Sequence[Path], robot: str, cameras: Sequence[str]) -> int:
    starts = []  # failures have no file, so that counting files would repeat some
    for file in files:
        begin = read_episode(file, cameras=()).begin
        if begin.robot not in ("", robot):
            other = f"{folder} holds demonstrations of robot {begin.robot!r} ({file.name}), expected {robot!r}"
            raise ConfigError(f"{other}. Give another --out")
        if match := re.fullmatch(r"seed-(\d+)", begin.init_state):
            starts.append(int(match[1]))
        if cameras:
            _check_cameras(file, cameras)
    return max(starts) + 1 if starts else DEMO_SEED_BASE + len(files)


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

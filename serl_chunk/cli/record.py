"""`serl-chunk record`: scripted demonstrations as HDF5 episodes, successes only."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.progress import Progress

from serl_chunk.actor.clock import Clock, TickClock
from serl_chunk.cli.process import say, spec_of
from serl_chunk.cli.signals import exit_at_once_while, never
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.data.formats.hdf5 import open_episode, read_episode
from serl_chunk.data.formats.hdf5_frames import close_files
from serl_chunk.data.formats.hdf5_writer import EpisodeWriter
from serl_chunk.data.source import ReadOptions
from serl_chunk.robots.base import RobotEnv
from serl_chunk.robots.registry import make_env, make_expert
from serl_chunk.types import IMAGE_PREFIX, Begin, ConfigError, End, Observation, Outcome, Source, Step

DEMO_SEED_BASE = 0  # start states of demonstrations; evaluation's begin at 1,000,000
MAX_FAILURES_PER_DEMO = 20  # an expert worse than this is a mistake, not bad luck


def run_record(
    config: ExperimentConfig, n_demos: int, out: str, *, policy: str, noise: float | None, cameras: tuple[str, ...]
) -> int:
    """Record until `out` holds `n_demos` successful episodes; an interrupted recording goes on where it stopped.

    Args:
        out: folder for the files; created if absent.
        policy: "scripted", the only demonstrator there is.
        noise: standard deviation of the expert's noise, rad; None leaves the expert's own.
        cameras: recorded at every tick.

    Raises ConfigError, also for an expert that hardly ever succeeds and for files in `out` of another robot or without
    one of `cameras`, and DataError for a damaged file there.
    """
    if policy != "scripted":
        raise ConfigError(f"--policy={policy}: only scripted is there; recording by hand comes with device support")
    if n_demos < 1:
        raise ConfigError(f"--n_demos must be at least 1, got {n_demos}")
    folder = Path(out).expanduser()
    files = list(folder.glob("episode_*.hdf5")) if folder.is_dir() else []
    there = len(files)
    _check_robot(folder, files, spec_of(config).name)
    if cameras:
        _check_cameras(folder, files, cameras)
    if there >= n_demos:
        say(f"{folder} already holds {there} demonstrations")
        return 0
    attempts = lengths = 0
    exit_at_once_while(never)  # an open robot is closed, however long it takes
    with contextlib.ExitStack() as stack:
        env = make_env(config.robot)
        stack.callback(env.close)
        for name in cameras:
            env.robot_spec.camera(name)
        expert = make_expert(env)
        if noise is not None:
            if not hasattr(expert, "noise"):
                raise ConfigError(f"the expert of {env.robot_spec.name!r} has no adjustable noise: leave --noise out")
            expert.noise = noise
        seed = next_seed(files)
        writer = EpisodeWriter(
            folder, env.robot_spec, keep=lambda e: e.end.outcome is Outcome.SUCCESS, sim=not config.robot.real
        )
        stack.enter_context(_kept_files_reported(writer, folder, there, n_demos))
        stack.enter_context(writer)
        progress = stack.enter_context(Progress(transient=True))
        task = progress.add_task(f"recording to {folder}", total=n_demos, completed=there)
        kept = there
        while kept < n_demos:
            success, length = record_episode(env, expert, writer, config, seed, cameras)
            writer.flush()  # a fast simulator would leave thousands of episodes waiting in memory
            seed += 1
            attempts += 1
            if success:
                kept += 1
                lengths += length
                progress.update(task, completed=kept)
            elif attempts - (kept - there) > MAX_FAILURES_PER_DEMO * n_demos:
                raise ConfigError(f"the expert failed {attempts - (kept - there)} of {attempts} episodes; giving up")
    new = kept - there
    seen = f", with cameras {', '.join(cameras)}" if cameras else ""
    say(f"{folder}: {new} demonstrations recorded in {attempts} episodes, {lengths / new:.0f} ticks on average{seen}")
    return 0


@contextlib.contextmanager
def _kept_files_reported(writer: EpisodeWriter, folder: Path, there: int, n_demos: int) -> Iterator[None]:
    """Print what an interrupted recording leaves, once `writer` is closed."""
    try:
        yield
    except KeyboardInterrupt:
        new = len(writer.written)
        say(
            f"interrupted: {folder} holds {there + new} of {n_demos} demonstrations, {new} of them new; the episode "
            "under way is dropped. The same command records the rest"
        )
        raise


def _check_robot(folder: Path, files: Sequence[Path], name: str) -> None:
    """Raise ConfigError where recorded `files` are of another robot than `name`; DataError for a damaged one."""
    for file in files:
        if (theirs := read_episode(file, cameras=()).begin.robot) not in ("", name):
            raise ConfigError(
                f"{folder} holds demonstrations of the robot {theirs!r} ({file.name}), and the experiment's is "
                f"{name!r}: give another --out"
            )


def _check_cameras(folder: Path, files: Sequence[Path], cameras: Sequence[str]) -> None:
    """Raise ConfigError where recorded `files` lack frames that are wanted; DataError for one that cannot be read."""
    for file in files:
        try:
            seen = open_episode(file, ReadOptions()).steps.sparse
        finally:
            close_files(file)
        missing = [c for c in cameras if IMAGE_PREFIX + c not in seen]
        if missing:
            raise ConfigError(
                f"{folder} holds demonstrations without frames of camera {missing[0]!r} ({file.name}), and training "
                "takes all or none: give another --out, remove these, or record without frames (--cameras none)"
            )


def next_seed(files: Sequence[Path]) -> int:
    """The start state after those of recorded `files`: failures have no file, so counting files would repeat some.

    Raises DataError for a file that cannot be read.
    """
    starts = (re.fullmatch(r"seed-(\d+)", read_episode(file, cameras=()).begin.init_state) for file in files)
    return max((int(match[1]) + 1 for match in starts if match), default=DEMO_SEED_BASE + len(files))


def record_episode(
    env: RobotEnv,
    expert,
    sink,
    config: ExperimentConfig,
    seed: int,
    cameras: tuple[str, ...],
    clock: Clock | None = None,
) -> tuple[bool, int]:
    """One episode by `expert` from `reset(seed)`; returns (success, ticks). A real robot is paced by `clock`."""
    spec = env.robot_spec
    observation, _ = env.reset(seed=seed)
    expert.reset(seed)
    episode_id = f"demo-{spec.name}-{seed:06d}"
    sink.begin(Begin(episode_id, config.robot.task, spec.name, spec.digest(), init_state=f"seed-{seed}"))
    ticks = TickClock(spec.dt, real=config.robot.real, clock=clock)
    tick = 0
    while True:
        stamp = ticks.begin(tick)
        seen = _with_images(env, observation, cameras)
        command = expert.act()
        observation, reward, terminated, truncated, info = env.step(command)
        executed = info.get("executed_action", command)
        sink.step(
            Step(tick, seen, executed, float(reward), Source.SCRIPTED, -1, -1, stamp, lost_ticks=ticks.lost_ticks)
        )
        tick += 1
        success = bool(info.get("success"))
        if terminated or truncated:
            outcome = Outcome.SUCCESS if success else Outcome.FAILURE
            final = _with_images(env, observation, cameras)
            sink.end(End(episode_id, tick, final, bool(terminated), not terminated, outcome))
            return success, tick


def _with_images(env: RobotEnv, observation: Observation, cameras: tuple[str, ...]) -> Observation:
    return {**observation, **env.read_images(cameras)} if cameras else dict(observation)

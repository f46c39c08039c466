"""Evaluation: fixed held-out start states, no interventions, the training's delay and lengths."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import rich.table

from serl_chunk.actor.clock import Clock
from serl_chunk.actor.episode import EpisodeRunner, no_stop
from serl_chunk.actor.inference import Inference
from serl_chunk.actor.policy import ChunkPolicy
from serl_chunk.actor.recorder import NullSink
from serl_chunk.actor.stats import EpisodeSummary
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.robots.base import RobotEnv
from serl_chunk.types import IMAGE_PREFIX, STATE, ConfigError, Source, Step
from serl_chunk.viz.video import EpisodeVideo

EVAL_SEED_BASE = 1_000_000  # start states of reported figures
VALIDATION_SEED_BASE = 2_000_000  # start states that checkpoints are chosen on
TRAINING_SEED_BASE = 3_000_000  # training episodes draw their seeds from here upwards


class Interval(NamedTuple):
    """A confidence interval of a proportion, 0..1."""

    low: float
    high: float


def wilson_interval(successes: int, n: int, z: float = 1.959964) -> Interval:
    """Wilson's score interval of `successes` in `n` trials, 95 % by default (Wilson 1927). (0, 1) for n = 0."""
    if n == 0:
        return Interval(0.0, 1.0)
    p = successes / n
    centre = p + z * z / (2 * n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    return Interval(max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale))


@dataclasses.dataclass(frozen=True)
class EvalResult:
    """What an evaluation came to."""

    mode: str  # "mean": the deterministic policy; "sampled": with its exploration noise
    seed_base: int  # episode i started from seed_base + i
    policy_version: int
    tick_seconds: float
    episodes: tuple[EpisodeSummary, ...]
    starts_repeat: bool | None = None  # whether two resets with one seed agree; None: not compared (a real robot)

    @property
    def n(self) -> int:
        """Episodes."""
        return len(self.episodes)

    @property
    def successes(self) -> int:
        """Episodes that succeeded."""
        return sum(e.success for e in self.episodes)

    @property
    def success_rate(self) -> float:
        """0..1; 0 without episodes."""
        return self.successes / self.n if self.n else 0.0

    @property
    def interval(self) -> Interval:
        """95 % (Wilson) of the success rate."""
        return wilson_interval(self.successes, self.n)

    @property
    def human_ticks(self) -> int:
        """Human ticks, where the environment itself permits interventions; any makes the figures worthless."""
        return sum(e.human_ticks for e in self.episodes)

    @property
    def starved_ticks(self) -> int:
        """Ticks in real time on which nothing was planned, so that the robot held."""
        return sum(e.starved_ticks for e in self.episodes)

    @property
    def mean_time_s(self) -> float | None:
        """Seconds on the control clock that successful episodes took; None without a success."""
        lengths = [e.length for e in self.episodes if e.success]
        return sum(lengths) / len(lengths) * self.tick_seconds if lengths else None

    @property
    def mean_return(self) -> float:
        """Undiscounted sum of an episode's rewards, before scale and offset; 0 without episodes."""
        return sum(e.total_reward for e in self.episodes) / self.n if self.n else 0.0

    @property
    def mean_length(self) -> float:
        """Ticks of all episodes."""
        return sum(e.length for e in self.episodes) / self.n if self.n else 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain values, per episode too."""
        keep = ("seed", "length", "total_reward", "success", "outcome", "ended_by", "human_ticks", "hold_ticks",
                "starved_ticks", "clipped_share", "gated_share", "jerk", "wall_seconds")  # fmt: skip
        return {
            "success_rate": self.success_rate,
            "n": self.n,
            "successes": self.successes,
            "low": self.interval.low,
            "high": self.interval.high,
            "mode": self.mode,
            "mean_time_s": self.mean_time_s,
            "mean_length": self.mean_length,
            "mean_return": self.mean_return,
            "seed_base": self.seed_base,
            "starts_repeat": self.starts_repeat,
            "policy_version": self.policy_version,
            "episodes": [{k: _plain(getattr(e, k)) for k in keep} for e in self.episodes],
        }


def _plain(value: Any) -> Any:
    return value.value if hasattr(value, "value") else value


def results_table(results: list[EvalResult]) -> rich.table.Table:
    """One row per result, for a terminal."""
    human = sum(r.human_ticks for r in results)
    who = "no interventions" if human == 0 else f"NOT the policy alone: a human acted on {human} ticks"
    repeat = all(r.starts_repeat is not False for r in results)
    starts = "held-out starts" if repeat else "starts that ignore the seed"
    table = rich.table.Table(title=f"evaluation, {starts}, {who}")
    starved = any(r.starved_ticks for r in results)
    for column in ("policy", "success", "95 % interval", "n", "time of successes", "length", *["starved"] * starved):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for r in results:
        table.add_row(
            f"{r.mode} (version {r.policy_version})",
            f"{100 * r.success_rate:.1f} %",
            f"{100 * r.interval.low:.1f} .. {100 * r.interval.high:.1f} %",
            str(r.n),
            "-" if r.mean_time_s is None else f"{r.mean_time_s:.2f} s",
            f"{r.mean_length:.1f} ticks",
            *[f"{r.starved_ticks} ticks"] * starved,
        )
    return table


def summary_line(result: EvalResult, report: str) -> str:
    """What scripts read: the result's rate and episodes, `report`, and what the rate is not the policy's alone for."""
    line = f"evaluation: success_rate={result.success_rate:.2f} n={result.n} report={report}"
    if result.human_ticks:
        line += f" human_ticks={result.human_ticks}"
    if result.starved_ticks:
        line += f" starved_ticks={result.starved_ticks}"
    if result.starts_repeat is False:
        line += " starts_repeat=no"
    return line


STATE_TOLERANCE = 1e-4  # of a state's number, absolute and relative: a simulator's rounding is less
FRAME_TOLERANCE = 16  # levels of 0..255 of any pixel: a renderer's noise is less, an object in another place more


def start_difference(env: RobotEnv, seed: int, cameras: tuple[str, ...]) -> str | None:
    """What differs between the starts of two resets with one `seed`, in words; None where they agree.

    Compared are the state and the frames of `cameras`, those that the policy sees.
    """
    starts = []
    for _ in range(2):
        state = np.array(env.reset(seed=seed)[0][STATE], np.float64)
        frames = env.read_images(cameras) if cameras else {}
        starts.append((state, {c: frames[IMAGE_PREFIX + c].astype(np.int16) for c in cameras}))
    (state, frames), (again, frames_again) = starts
    differing = np.flatnonzero(~np.isclose(state, again, rtol=STATE_TOLERANCE, atol=STATE_TOLERANCE))
    if len(differing):
        i = differing[0]
        return f"state[{i}] is {state[i]:.4g} and {again[i]:.4g}"
    for c in cameras:
        if (pixels := np.abs(frames[c] - frames_again[c])).max() > FRAME_TOLERANCE:
            return f"camera {c!r} differs by up to {pixels.max()} levels"
    return None


def _compare_starts(
    env: RobotEnv, config: ExperimentConfig, seed: int, cameras: tuple[str, ...], say: Callable[[str], None] | None
) -> None:
    """Set `env.starts_repeat`, once, and warn where its starts do not follow the seed. A real robot is not moved."""
    if env.starts_repeat is not None or config.robot.real:
        return
    difference = start_difference(env, seed, cameras)
    env.starts_repeat = difference is None
    if difference is not None and say is not None:
        say(
            f"WARNING: robot {env.robot_spec.name!r} does not start as reset(seed=...) asks: after two resets with one "
            f"seed {difference}. There are then no held-out starts, and two evaluations begin differently. Draw starts "
            "from gymnasium's self.np_random, or seed the generator that the environment draws from in a wrapper's "
            "reset (docs/your_robot.md, section 2)"
        )


class _Film(NullSink):
    """Films episodes: images are taken before a tick, and who acted on it is known from its record."""

    def __init__(self, env: RobotEnv) -> None:
        self._env = env
        self._images: dict[int, dict[str, np.ndarray]] = {}  # by tick, until its record comes
        self.video: EpisodeVideo | None = None

    def observe(self, tick: int) -> None:
        if self.video is not None:
            self._images[tick] = self._env.read_images()

    def step(self, record: Step) -> None:
        images = self._images.pop(record.tick, None)
        if self.video is not None and images is not None:
            self.video.add(images, human=record.source is Source.HUMAN)


def evaluate(
    env: RobotEnv,
    policy: ChunkPolicy,
    config: ExperimentConfig,
    *,
    n: int,
    seed_base: int = EVAL_SEED_BASE,
    deterministic: bool = True,
    save_video: Path | None = None,
    filmed: int | None = None,
    progress: Callable[[int, EpisodeSummary], None] | None = None,
    clock: Clock | None = None,
    inference: Inference | None = None,
    stop: Callable[[], str | None] = no_stop,
    say: Callable[[str], None] | None = None,
) -> EvalResult:
    """`n` episodes from the start states `seed_base + i`, without interventions; nothing is recorded.

    Args:
        config: the training's: its clock, delay and lengths apply here too.
        deterministic: the policy's mean instead of a sample.
        save_video: a folder for one mp4 per episode, named by its outcome.
        filmed: how many episodes are filmed, the first ones; None for all.
        progress: called after each episode with the number done and its summary.
        stop: a word ends the evaluation; the episode it cuts short is not counted.
        say: told what `EpisodeRunner` tells, and once for an environment where its starts do not follow the seed.

    Raises ConfigError for n < 1, and with the install hint where videos cannot be written.
    """
    if n < 1:
        raise ConfigError(f"an evaluation needs at least 1 episode (--eval_n_trajs), got {n}")
    film = _Film(env)
    if save_video is not None and not env.robot_spec.cameras:
        raise ConfigError(
            f"robot {env.robot_spec.name!r} has no camera to film with: leave --save_video (or --video_episodes) out"
        )
    _compare_starts(env, config, seed_base, policy.image_keys, say)
    runner = EpisodeRunner(
        env,
        policy,
        film,
        config=config,
        clock=clock,
        inference=inference,
        stop=stop,
        observer=None if save_video is None else film.observe,
    )
    done: list[EpisodeSummary] = []
    mode = "mean" if deterministic else "sampled"
    try:
        for i in range(n):
            if stop() is not None:
                break
            if save_video is not None and (filmed is None or i < filmed):
                film.video = EpisodeVideo(save_video / f"{mode}_{i:03d}.mp4", env.robot_spec.control_hz)
            summary = runner.run_episode(seed_base + i, explore=not deterministic)
            if summary.ended_by == stop():  # cut short
                break
            done.append(summary)
            if film.video is not None:
                film.video.add(env.read_images())
                film.video.finish(f"{mode}_{i:03d}_{summary.outcome}.mp4")
                film.video = None
            if progress is not None:
                progress(i + 1, summary)
    finally:
        if film.video is not None:
            film.video.discard()
        runner.close()
    return EvalResult(mode, seed_base, policy.version, env.robot_spec.dt, tuple(done), env.starts_repeat)

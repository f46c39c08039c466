"""Evaluation: fixed held-out start states, no interventions, the training's delay and lengths."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import rich.table

from serl_chunk.actor.clock import Clock
from serl_chunk.actor.episode import EpisodeRunner, no_stop
from serl_chunk.actor.policy import ActingAgent, ChunkPolicy
from serl_chunk.actor.recorder import NullSink
from serl_chunk.actor.stats import EpisodeSummary, RolloutStats
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.data.normalise.normaliser import Normaliser
from serl_chunk.io import plural
from serl_chunk.robots.base import RobotEnv
from serl_chunk.types import IMAGE_PREFIX, STATE, ConfigError, Snapshot, Source, Step
from serl_chunk.viz.video import EpisodeVideo

logger = logging.getLogger(__name__)

EVAL_SEED_BASE = 1_000_000  # start states of reported figures
VALIDATION_SEED_BASE = 2_000_000  # start states that checkpoints are chosen on
TRAINING_SEED_BASE = 3_000_000  # training episodes draw their seeds from here upwards


FAULT_REPEATS = 2  # of an episode that the robot ended by a fault; after that it counts as a failure


class Interval(NamedTuple):
    """A confidence interval of a proportion, 0..1."""

    low: float
    high: float


def wilson_interval(successes: int, n: int) -> Interval:
    """Wilson's 95 % score interval of `successes` in `n` trials (Wilson 1927); (0, 1) for n = 0."""
    if n == 0:
        return Interval(0.0, 1.0)
    p, z = successes / n, 1.959964
    centre = p + z * z / (2 * n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    return Interval(max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale))


# Of each episode, in an evaluation's file.
_EPISODE_FIELDS = (
    "seed", "length", "total_reward", "success", "outcome", "ended_by", "human_ticks", "hold_ticks", "starved_ticks",
    "clipped_share", "gated_share", "jerk", "wall_seconds",
)  # fmt: skip


def _fields(episode: EpisodeSummary) -> dict[str, Any]:
    there: dict[str, Any] = {"fault": episode.fault} if episode.fault else {}
    there |= {"conditions": json.loads(episode.conditions)} if episode.conditions else {}
    return {k: getattr(episode, k) for k in _EPISODE_FIELDS} | there


@dataclasses.dataclass(kw_only=True)
class EvalResult(RolloutStats):
    """The episodes of an evaluation."""

    mode: Literal["mean", "sampled"]  # "mean": the deterministic policy; "sampled": with its exploration noise
    seed_base: int  # episode i started from seed_base + i
    policy_version: int
    tick_seconds: float
    starts_repeat: bool | None = None  # whether two resets with one seed agree; None: not compared (a real robot)
    repeated: list[EpisodeSummary] = dataclasses.field(default_factory=list)  # ended by a fault; done again
    summaries: list[EpisodeSummary] = dataclasses.field(default_factory=list)

    @property
    def interval(self) -> Interval:
        return wilson_interval(self.successes, self.episodes)

    @property
    def mean_time_s(self) -> float | None:
        """Seconds on the control clock that successful episodes took; None without a success."""
        return self.success_steps / self.successes * self.tick_seconds if self.successes else None

    def figures(self) -> dict[str, Any]:
        rate = {"success_rate": self.success_rate, "n": self.episodes, **self.interval._asdict(), "mode": self.mode}
        return rate | {k: getattr(self, k) for k in ("mean_time_s", "mean_length", "mean_return")}

    def to_json(self) -> dict[str, Any]:
        return {
            "success_rate": self.success_rate,
            "n": self.episodes,
            "successes": self.successes,
            **self.figures(),
            "seed_base": self.seed_base,
            "starts_repeat": self.starts_repeat,
            "policy_version": self.policy_version,
            "episodes": [_fields(e) for e in self.summaries],
            **({"repeated": [_fields(e) for e in self.repeated]} if self.repeated else {}),
        }

    def __str__(self) -> str:
        low, high = self.interval
        rate = f"{self.success_rate:.1%} success ({100 * low:.0f} .. {100 * high:.0f} %)"
        return f"{rate} in {plural(self.episodes, 'episode')}, {self.mean_length:.0f} ticks on average"


def results_table(results: list[EvalResult]) -> rich.table.Table:
    """Build a table for a terminal with one row per result."""
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
            str(r.episodes),
            "-" if r.mean_time_s is None else f"{r.mean_time_s:.2f} s",
            f"{r.mean_length:.1f} ticks",
            *[f"{r.starved_ticks} ticks"] * starved,
        )
    return table


def summary_line(result: EvalResult, report: str) -> str:
    """Return the last line, which scripts read."""
    line = f"evaluation: success_rate={result.success_rate:.2f} n={result.episodes} report={report}"
    if result.human_ticks:
        line += f" human_ticks={result.human_ticks}"
    if result.starved_ticks:
        line += f" starved_ticks={result.starved_ticks}"
    if faults := len(result.repeated) + sum(bool(e.fault) for e in result.summaries):
        line += f" faults={faults}"
    if result.starts_repeat is False:
        line += " starts_repeat=no"
    return line


STATE_TOLERANCE = 1e-4  # of a state's number, absolute and relative: a simulator's rounding is less
FRAME_TOLERANCE = 16  # levels of 0..255 of any pixel: a renderer's noise is less, an object in another place more


def _start_difference(env: RobotEnv, seed: int, cameras: tuple[str, ...]) -> str | None:
    """Describe how state or frames of `cameras` differ between two resets with one `seed`; None where they agree."""
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


def _compare_starts(env: RobotEnv, config: ExperimentConfig, seed: int, cameras: tuple[str, ...]) -> None:
    if env.starts_repeat is not None or config.robot.real:
        return
    difference = _start_difference(env, seed, cameras)
    env.starts_repeat = difference is None
    if difference is not None:
        logger.warning(
            f"robot {env.robot_spec.name!r} ignores the seed of reset(seed=...): after two resets with one seed "
            f"{difference}. There are then no held-out starts, and two evaluations begin differently. Draw starts from "
            "gymnasium's self.np_random, or seed the generator that the environment draws from in a wrapper's reset "
            "(docs/your_robot.md, section 2)"
        )


class _Film(NullSink):
    """Films episodes: images are taken before a tick, its source comes with its record."""

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
    env: RobotEnv, policy: ChunkPolicy, config: ExperimentConfig,
    *, n: int, seed_base: int = EVAL_SEED_BASE, deterministic: bool = True, save_video: Path | None = None,
    filmed: int | None = None, progress: Callable[[EvalResult], None] | None = None, clock: Clock | None = None,
    stop: Callable[[], str | None] = no_stop,
) -> EvalResult:  # fmt: skip
    """Run `n` episodes from the start states `seed_base + i`, without interventions; nothing is recorded.

    One that the robot ended by a fault is repeated, at most FAULT_REPEATS times; the last of these counts.

    Args:
        config: the training's: its clock, delay and lengths apply here too.
        deterministic: the policy's mean instead of a sample.
        save_video: a folder for one mp4 of each of the first `filmed` episodes (None: all), named by its outcome.
        progress: called after each episode with the result so far.
        stop: polled on every tick; a string ends the evaluation. The episode that it cuts short is not counted.

    Raises ConfigError for n < 1, and with the install hint where videos cannot be written.
    """
    if n < 1:
        raise ConfigError(f"must be at least 1 episode, got {n}", parameter="n")
    if save_video is not None and not env.robot_spec.cameras:
        raise ConfigError(
            f"robot {env.robot_spec.name!r} has no camera to film with. Evaluate without films", parameter="save_video"
        )
    _compare_starts(env, config, seed_base, policy.image_keys)
    film = _Film(env)
    observer = None if save_video is None else film.observe
    runner = EpisodeRunner(env, policy, film, config=config, clock=clock, stop=stop, observer=observer)
    mode: Literal["mean", "sampled"] = "mean" if deterministic else "sampled"
    result = EvalResult(
        mode=mode,
        seed_base=seed_base,
        policy_version=policy.version,
        tick_seconds=env.robot_spec.dt,
        starts_repeat=env.starts_repeat,
    )
    try:
        for i in range(n):
            if stop() is not None:
                break
            for attempt in range(1 + FAULT_REPEATS):
                if save_video is not None and (filmed is None or i < filmed):
                    film.video = EpisodeVideo(save_video / f"{mode}_{i:03d}.mp4", env.robot_spec.control_hz)
                summary = runner.run_episode(seed_base + i, explore=not deterministic)
                if not summary.fault or attempt == FAULT_REPEATS or stop() is not None:
                    break
                result.repeated.append(summary)
                if film.video is not None:
                    film.video.discard()
                    film.video = None
            if summary.ended_by == stop():  # cut short
                break
            result.merge(summary)
            result.summaries.append(summary)
            if film.video is not None:
                film.video.add(env.read_images())
                film.video.finish(f"{mode}_{i:03d}_{summary.outcome}.mp4")
                film.video = None
            if progress is not None:
                progress(result)
    finally:
        if film.video is not None:
            film.video.discard()
        runner.close()
    result.policy_version = policy.version
    return result


def evaluate_snapshot(
    env: RobotEnv, agent: ActingAgent, normaliser: Normaliser, snapshot: Snapshot, config: ExperimentConfig,
    **options: Any,
) -> EvalResult:  # fmt: skip
    """Evaluate the policy of a snapshot; `options` as of `evaluate`. Its noise depends on `config.seed` alone."""
    seed, keys = config.seed + 1, config.agent.image_keys
    policy = ChunkPolicy(agent, normaliser, env.robot_spec, image_keys=keys, seed=seed)
    policy.swap(snapshot)
    return evaluate(env, policy, config, **options)

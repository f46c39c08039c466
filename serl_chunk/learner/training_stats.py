"""Training statistics, written as one metrics row every `log_period` updates."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from serl_chunk.agents.state import Metrics
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.learner.profiling import PROFILE, CallFigures, UpdateTrace
from serl_chunk.replay.episode import EpisodeStats
from serl_chunk.replay.partitions import realised_returns
from serl_chunk.replay.replay import Half, Replay
from serl_chunk.runs.metrics import Counters, MetricsLog, read_metrics
from serl_chunk.types import Amend, Episode, Outcome

logger = logging.getLogger(__name__)

RECENT = 20  # episodes in the success without intervention
MEASURE_AFTER = 2.0  # seconds without a metric row from which a waiting learner renews what the status line shows
_DUST = 1e-6  # of sums of float32 rewards


class TrainingStats:
    """Writes a metric row every `log_period` updates and one for every episode; times are seconds.

    Args:
        publishing: see `CallFigures`.
        profile: updates that are traced.
    """

    def __init__(
        self, metrics: MetricsLog, replay: Replay, log_period: int, counters: Callable[[], Counters], mode: str,
        publishing: Callable[[], float] = lambda: 0.0, profile: int = 0,
    ) -> None:  # fmt: skip
        self.metrics, self.model_space = metrics, ModelSpace(metrics, replay, mode)
        self._replay, self._log_period, self._counters = replay, log_period, counters
        self._calls = CallFigures(publishing, UpdateTrace(metrics.run_dir / PROFILE, profile))
        self._last_metrics: Any = None
        # Since the last row, but for `_updates`, which counts on.
        self._start = time.perf_counter()
        self._updates = self._logged_updates = self._env_steps = 0
        self._waited, self._seconds = 0.0, {"sampling": 0.0, "actors_waited": 0.0, "relabelling": 0.0}
        self.rates: dict[str, float] = {}
        self._compiling, self._called = "", set[str]()
        self.waiting = (0.0, 0.0)  # recent shares of time the learner waited for steps, and actors for updates
        self._recent: deque[EpisodeStats] = deque(maxlen=RECENT)  # judged ones
        self._evaluated = 0.0
        self._evaluation_start: float | None = None

    @property
    def success_without_intervention(self) -> float | None:
        """Share of the last 20 judged episodes that succeeded without a human; None before one.

        A helped episode counts as no success: left out, it would make the policy look better the more often a human
        saves it.
        """
        alone = [bool(e.success) and e.human_ticks == 0 for e in self._recent]
        return sum(alone) / len(alone) if alone else None

    @property
    def has_updated(self) -> bool:
        return self._updates > 0

    @property
    def evaluating(self) -> bool:
        return self._evaluation_start is not None

    @property
    def evaluation_seconds(self) -> float:
        """Seconds that evaluations took so far, one that is under way included."""
        start = self._evaluation_start
        return self._evaluated + (0.0 if start is None else time.perf_counter() - start)

    @property
    def busy(self) -> str:
        """What takes the learner minutes in which no actor is allowed more steps; empty otherwise."""
        return "it evaluates" if self.evaluating else self._compiling

    def has_called(self, what: str) -> bool:
        return what in self._called

    @contextlib.contextmanager
    def first_call(self, what: str) -> Iterator[None]:
        """Around updates of a kind: the first compiles, which is logged at once."""
        if what in self._called:
            yield
            return
        self._called.add(what)
        self._compiling = f"it compiles {what}"
        logger.info(f"compiling {what}, which may take minutes; actors may have to wait")
        start = time.perf_counter()
        try:
            yield
        finally:
            self._compiling = ""
        logger.info(f"compiled {what} in {time.perf_counter() - start:.1f} s")

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Around an evaluation, in whose time nothing is trained."""
        with self.aside():
            start = self._evaluation_start = time.perf_counter()
            try:
                with self.metrics.pause():
                    yield
            finally:
                self._evaluation_start = None
        self._evaluated += time.perf_counter() - start

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Around work that is neither training nor waiting; rates leave out its time and the steps that came in."""
        start, env_steps = time.perf_counter(), self._counters().env_steps
        yield
        self._start += time.perf_counter() - start
        self._env_steps += self._counters().env_steps - env_steps

    @contextlib.contextmanager
    def timed(self, what: Literal["sampling", "actors_waited", "relabelling"]) -> Iterator[None]:
        """Around waiting for a batch, an update for which actors wait, or the choice of what is imitated."""
        start = time.perf_counter()
        yield
        self._seconds[what] += time.perf_counter() - start

    def waited(self, seconds: float) -> None:
        """Count time in which the learner waited for steps."""
        self._waited += seconds
        now = time.perf_counter()
        if now - self._start > MEASURE_AFTER:
            self._measure(now)

    @property
    def updates_to_row(self) -> int:
        """Updates up to the next row; 1 while calls are traced, which counts them one by one."""
        return self._log_period - self._updates % self._log_period if self._calls.trace.over else 1

    def updated(self, updates: int, metrics: Metrics) -> None:
        """Count as `count` does; may write a row."""
        before = self._updates
        self.count(updates, metrics)
        if before // self._log_period != self._updates // self._log_period:
            self.log(metrics)

    def count(self, updates: int, metrics: Metrics) -> None:
        """Count a call of so many updates, or gradient steps of an iteration; may wait for the one before."""
        # Waiting for the update before last bounds what is dispatched ahead, and makes the rates true.
        jax.block_until_ready(self._last_metrics)
        self._last_metrics = metrics
        self._updates += updates
        self._calls.called(updates, metrics)

    def _measure(self, now: float) -> None:
        seconds, done = max(now - self._start, 1e-9), self._updates - self._logged_updates
        sampling, actors_waited, relabelling = self._seconds.values()
        self.rates = {
            "rates/updates_per_s": done / seconds,
            "rates/env_steps_per_s": (self._counters().env_steps - self._env_steps) / seconds,
            "wait/learner_s": self._waited,
            "wait/actor_s": actors_waited,
            "timer/sample_replay_buffer": sampling / max(done, 1),
            "timer/train": (seconds - self._waited - sampling - relabelling) / max(done, 1),
        }
        if relabelling:
            self.rates["timer/relabel"] = relabelling / max(done, 1)
        self.waiting = self._waited / seconds, actors_waited / seconds

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Write a row now, with numbers of the training; of several calls the last one's."""
        now, counters = time.perf_counter(), self._counters()
        self._measure(now)
        values, stats = {k: float(np.ravel(v)[-1]) for k, v in metrics.items()}, self._replay.stats()
        values |= self._calls.row(stats, self._updates - self._logged_updates)
        self.metrics.train(counters, {**values, **self.rates, **stats})
        self._start, self._env_steps, self._logged_updates = now, counters.env_steps, self._updates
        self._waited, self._seconds = 0.0, dict.fromkeys(self._seconds, 0.0)

    def close(self) -> None:
        """End a trace that is not whole."""
        self._calls.trace.close()

    def episode(self, e: EpisodeStats, *, number: int, phase: Literal["warmup", "train"]) -> None:
        """Write the row of an online episode, the `number`th."""
        if e.success is not None:
            self._recent.append(e)
        self.metrics.episode(
            self._counters(), actor_id=e.session.rpartition("/")[0] or e.session, ret=e.episode_return,
            length=e.length, succeed=e.success, intervention_steps=e.human_ticks, intervention_count=e.segments,
            phase=phase, success_without_intervention=self.success_without_intervention, number=number,
            seam_acceleration=e.accelerations[0], acceleration=e.accelerations[1],
            episode=f"{e.session}/{e.episode_id}", last_reward=e.last_reward,
            **dict(zip(("other_share", "q_first", "q_best"), e.candidates or (), strict=False)), **_begun(e.conditions),
            q=[q for q, _ in e.decisions], g=[g for _, g in e.decisions],
        )  # fmt: skip

    def correction(self, session: str, amend: Amend) -> None:
        """Write the correction of an episode, and count it as corrected."""
        self.metrics.correction(session, amend, self._counters())
        success = None if amend.discard else amend.outcome is Outcome.SUCCESS
        key = session, amend.episode_id
        recent = [e._replace(success=success) if (e.session, e.episode_id) == key else e for e in self._recent]
        self._recent = deque((e for e in recent if e.success is not None), maxlen=RECENT)


def _begun(conditions: str) -> dict[str, Any]:
    """Return how an episode of tasks in turns began (`actor.turns`), of conditions that any actor may have sent."""
    try:
        start, ticks = (json.loads(conditions)[name] for name in ("start", "since_reset"))
    except (ValueError, TypeError, LookupError):
        return {}
    return {"start": start, "since_reset": ticks} if isinstance(start, str) and type(ticks) is int else {}


class ModelSpace:
    """Warns once a run where more than 5 % of the recorded actions' numbers lie outside of model space, [-1, 1].

    Apart for demonstrations and online episodes; in the log and as an event.
    """

    def __init__(self, metrics: MetricsLog, replay: Replay, mode: str) -> None:
        self._metrics, self._replay, self._mode = metrics, replay, mode
        self._warned: set[str] = set()

    def check(self, counters: Counters) -> None:
        """Warn, the first time in the run, of demonstrations and of online episodes."""
        for half, name in _HALVES.items():
            outside, numbers = self._replay.outside_model_space[half]
            if name in self._warned or numbers < _LEAST_NUMBERS or outside <= _MOST_OUTSIDE * numbers:
                continue
            self._warned.add(name)
            what = f"warning: actions outside of model space: {name}"
            if any(row["text"].startswith(what) for row in read_metrics(self._metrics.run_dir)["event"]):
                continue  # a previous process of the run did
            demonstrated = self._replay.outside_model_space["demo"].numbers > 0
            text = (
                f"{what}, {outside / numbers:.1%} of their numbers (expected at most {_MOST_OUTSIDE:.0%}) with "
                f"normaliser.actions={self._mode}. The policy cannot output them. In a new run, "
                f"{_remedy(self._mode, demonstrated=demonstrated)}"
            )
            self._metrics.event(text, counters)
            logger.warning("%s", text.removeprefix("warning: "))


_HALVES: dict[Half, str] = {"demo": "demonstrations", "online": "online episodes"}
_MOST_OUTSIDE = 0.05
_LEAST_NUMBERS = 1_000  # before a share is judged


def _remedy(mode: str, *, demonstrated: bool) -> str:
    """Return which settings of the normaliser to change."""
    if mode == "norm_stats":
        return "write normaliser.norm_stats from these data (serl-chunk data stats), or set normaliser.actions=relative"
    if mode == "absolute_range":
        return "widen the robot's action_low and action_high, or set normaliser.actions=relative or absolute_demo"
    if not demonstrated:
        return "give demonstrations (demo_path), which the scale is fitted to, or set normaliser.actions=absolute_range"
    return "give demonstrations (demo_path) that move as far, or lower normaliser.demo_range to leave room beyond them"


class ValueRange:
    """Warns once where a realised return lies outside of the range that the critic is bounded by: it is clipped."""

    def __init__(self, config: ExperimentConfig) -> None:
        self._reward, self._discount = config.reward, config.discount
        self._silent = config.value_range is None
        self._low, self._high = config.value_range or (0.0, 0.0)

    def demonstrations(self, episodes: Sequence[Episode]) -> None:
        for e in episodes:
            if self._silent:
                return
            returns = realised_returns(e, self._reward, self._discount)
            self.check(f"demonstration {e.begin.episode_id}", float(returns.min()), float(returns.max()))

    def check(self, what: str, least: float, most: float) -> None:
        """Warn, the first time, where the returns of `what` are not within the range."""
        if self._silent or (least >= self._low - _DUST and most <= self._high + _DUST):
            return
        self._silent = True
        logger.warning(
            f"{what} has returns of {least:.4g} to {most:.4g}, outside of {self._low:g} to {self._high:g}, which "
            "rewards of 0, and 1 at a success, allow: they are clipped, and look alike to the critic. Set reward.scale "
            "and reward.offset so that they fit, or use --preset qc, whose critic has no range"
        )

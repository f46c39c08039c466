"""Training statistics, written as one metrics row every `log_period` updates."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax

from serl_chunk.replay.episode import EpisodeStats
from serl_chunk.replay.replay import Replay
from serl_chunk.runs.metric_rows import Counters
from serl_chunk.runs.metrics import MetricsLog


class IntervalStats:
    """What the training loop adds up between two metric rows; times in seconds."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.updates = self.logged_updates = self.env_steps = 0
        self.waited = self.actors_waited = self.sampling = 0.0
        self.last_metrics: Any = None

    def rates(self, env_steps: int, now: float) -> dict[str, float]:
        """Rates, waits and timers since the last row, under their metric names."""
        seconds = self.seconds(now)
        done = self.updates - self.logged_updates
        return {
            "rates/updates_per_s": done / seconds,
            "rates/env_steps_per_s": (env_steps - self.env_steps) / seconds,
            "wait/learner_s": self.waited,
            "wait/actor_s": self.actors_waited,
            "timer/sample_replay_buffer": self.sampling / max(done, 1),
            "timer/train": (seconds - self.waited - self.sampling) / max(done, 1),
        }

    def waits(self, now: float) -> tuple[float, float]:
        """Shares of the time since the last row: the learner waited for steps, the actors for updates."""
        return self.waited / self.seconds(now), self.actors_waited / self.seconds(now)

    def seconds(self, now: float) -> float:
        return max(now - self.start, 1e-9)

    def leave_out(self, seconds: float, env_steps: int) -> None:
        """Forget a stretch in which nothing was trained, with the steps that came in meanwhile."""
        self.start += seconds
        self.env_steps += env_steps

    def begin_anew(self, env_steps: int, now: float) -> None:
        """A metric row was written."""
        self.start, self.env_steps, self.logged_updates = now, env_steps, self.updates
        self.waited = self.sampling = self.actors_waited = 0.0


RECENT = 20  # episodes in the success without intervention
MEASURE_AFTER = 2.0  # seconds without a metric row from which a waiting learner renews what the status line shows


class TrainingStats:
    """Writes a metric row every `log_period` updates and one for every episode.

    Args:
        counters: where the run stands.
    """

    def __init__(self, metrics: MetricsLog, replay: Replay, log_period: int, counters: Callable[[], Counters]) -> None:
        self.metrics = metrics
        self._replay, self._log_period, self._counters = replay, log_period, counters
        self._period = IntervalStats()
        self.rates: dict[str, float] = {}
        self.waiting = (0.0, 0.0)  # shares of time the learner waited for steps, and actors for updates, of late
        self._recent: deque[bool] = deque(maxlen=RECENT)  # whether the policy alone succeeded
        self._evaluated = 0.0
        self._evaluation_start: float | None = None

    @property
    def success_without_intervention(self) -> float | None:
        """Share of the last 20 judged episodes, helped ones included, that succeeded without a human; None before one.

        A helped episode counts as none: left out of both counts, it would make the policy look the better the more
        often a human saves it.
        """
        return sum(self._recent) / len(self._recent) if self._recent else None

    @property
    def evaluating(self) -> bool:
        return self._evaluation_start is not None

    @property
    def evaluation_seconds(self) -> float:
        """Seconds that evaluations took so far, which are no time of training; one that is under way included."""
        start = self._evaluation_start
        return self._evaluated + (0.0 if start is None else time.perf_counter() - start)

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Around an evaluation, in whose time nothing is trained."""
        start, env_steps = time.perf_counter(), self._counters().env_steps
        self._evaluation_start = start
        try:
            with self.metrics.pause():
                yield
        finally:
            self._evaluation_start = None
        seconds = time.perf_counter() - start
        self._evaluated += seconds
        self._period.leave_out(seconds, self._counters().env_steps - env_steps)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Around work that is neither training nor waiting; rates leave its time out."""
        start, env_steps = time.perf_counter(), self._counters().env_steps
        yield
        self._period.leave_out(time.perf_counter() - start, self._counters().env_steps - env_steps)

    @contextlib.contextmanager
    def sampling(self) -> Iterator[None]:
        """Around waiting for a batch."""
        start = time.perf_counter()
        yield
        self._period.sampling += time.perf_counter() - start

    def waited(self, seconds: float) -> None:
        self._period.waited += seconds
        now = time.perf_counter()
        if now - self._period.start > MEASURE_AFTER:
            self._measure(now)

    @contextlib.contextmanager
    def actors_wait(self, waiting: bool) -> Iterator[None]:
        """Around an update; where `waiting`, its time is time that actors waited."""
        start = time.perf_counter()
        yield
        if waiting:
            self._period.actors_waited += time.perf_counter() - start

    def updated(self, updates: int, metrics: dict[str, jax.Array]) -> None:
        """Count a call of so many updates; may wait for the one before, and write a row."""
        # Waiting for the update before last bounds what is dispatched ahead, and makes the rates true.
        jax.block_until_ready(self._period.last_metrics)
        self._period.last_metrics = metrics
        before = self._period.updates
        self._period.updates += updates
        if before // self._log_period != self._period.updates // self._log_period:
            self._log(metrics)

    def _measure(self, now: float) -> None:
        steps = self._counters().env_steps
        self.rates, self.waiting = self._period.rates(steps, now), self._period.waits(now)

    def _log(self, metrics: dict[str, jax.Array]) -> None:
        now = time.perf_counter()
        self._measure(now)
        values = {k: float(v) for k, v in metrics.items()}
        counters = self._counters()
        self.metrics.train(counters, {**values, **self.rates, **self._replay.stats()})
        self._period.begin_anew(counters.env_steps, now)

    def episode(self, e: EpisodeStats, *, number: int, phase: Literal["warmup", "train"]) -> None:
        """Write the row of an online episode, the `number`th; `phase` is "train" or "warmup"."""
        if e.success is not None:
            self._recent.append(e.success and e.human_ticks == 0)
        self.metrics.episode(
            self._counters(),
            actor_id=e.session.rpartition("/")[0] or e.session,
            ret=e.episode_return,
            length=e.length,
            succeed=e.success,
            intervention_steps=e.human_ticks,
            intervention_count=e.segments,
            phase=phase,
            success_without_intervention=self.success_without_intervention,
            number=number,
            q=[q for q, _ in e.decisions],
            g=[g for _, g in e.decisions],
        )

"""Fits the alarm to recorded episodes, and measures it on others.

An episode failed where it did not succeed in its time, was labelled a failure, or a human intervened: an operator who
takes the robot over saw a failure coming. What counts of it is what the policy did before the first human tick. How an
episode would have gone on that was ended in another way (a stop, a fault, the learner's end) is not known, and it is
left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from serl_chunk.attention.alarm import Alarm, FittedRun, Watch
from serl_chunk.types import DECISION_PREFIX, ConfigError, Episode, Outcome, Source

Q = f"{DECISION_PREFIX}q"
_RANGE = (1.0, 99.0)  # percentiles of Q that are its range: single values far outside would stretch it


class Trace(NamedTuple):
    """What counts of an episode: N decisions of its policy before the first human tick."""

    name: str
    ticks: np.ndarray  # int[N]
    q: np.ndarray  # float64[N]
    end: int  # ticks until it ended, or a human took over
    failed: bool
    by_human: bool  # a human took over
    period: float  # seconds of a tick


class Judged(NamedTuple):
    """A trace under an alarm."""

    trace: Trace
    fall: float  # the largest one
    lead: float | None  # seconds from the alarm to the end; None: no alarm


def trace_of(name: str, episode: Episode, hz: float) -> Trace | None:
    """Return what counts of an episode; None where its policy decided nothing, or how it ended is not known."""
    steps, end = episode.steps, episode.end
    rows = steps.sparse.get(Q)
    human = np.flatnonzero(steps.source == Source.HUMAN)
    stop = int(human[0]) if len(human) else steps.n
    timed_out = end.outcome is Outcome.UNKNOWN and end.truncated and end.outcome_by == "environment"
    known = len(human) or timed_out or end.outcome is not Outcome.UNKNOWN
    if rows is None or not known:
        return None
    counts = rows.index < stop
    if not counts.any():
        return None
    q = np.asarray(rows.values, np.float64)[counts]
    failed = bool(len(human)) or end.outcome is not Outcome.SUCCESS
    return Trace(name, rows.index[counts], q.reshape(len(q), -1).max(1), stop, failed, bool(len(human)), 1 / hz)


def largest_fall(alarm: Alarm, trace: Trace) -> float:
    """Return the largest fall of an episode."""
    watch = Watch(alarm)
    return max(watch.fall(q) for q in trace.q.tolist())


def judge(alarm: Alarm, traces: Sequence[Trace]) -> list[Judged]:
    """Return every trace with its alarm, the first one of an episode alone."""
    out = []
    for trace in traces:
        watch = Watch(alarm)
        at = next((t for t, q in zip(trace.ticks, trace.q, strict=True) if watch.decided({"q": q})), None)
        lead = None if at is None else float((trace.end - at) * trace.period)
        out.append(Judged(trace, largest_fall(alarm, trace), lead))
    return out


def fit(traces: Sequence[Trace], runs: Sequence[FittedRun], false_alarms: float) -> Alarm:
    """Choose the smallest fall that at most a share `false_alarms` of the successful episodes exceeds.

    Raises ConfigError: no success, no failure, or all values of Q are one.
    """
    failed = sum(trace.failed for trace in traces)
    if not failed or failed == len(traces):
        raise ConfigError(
            f"{len(traces)} episodes count and {failed} of them failed; both kinds are needed. Add runs, or wait for "
            "more episodes"
        )
    low, high = np.percentile(np.concatenate([trace.q for trace in traces]), _RANGE).tolist()
    if not low < high:
        raise ConfigError(f"Q is {low:g} in all decisions. Use runs whose critic has been trained")
    alarm = Alarm(0.0, low, high, false_alarms, tuple(runs))
    falls = sorted((largest_fall(alarm, t) for t in traces if not t.failed), reverse=True)
    alarm = dataclasses.replace(alarm, fall=falls[int(false_alarms * len(falls) + 1e-9)])
    return dataclasses.replace(alarm, fitted=Figures.of(judge(alarm, traces)).to_json())


@dataclasses.dataclass(frozen=True)
class Figures:
    """Counts of episodes: an alarm in one that failed is true, in one that succeeded false."""

    true_alarms: int
    missed: int
    false_alarms: int
    quiet: int  # successes without an alarm
    interventions: int  # failures that a human ended
    leads: tuple[float, ...]  # seconds from each true alarm to the episode's end, or to the human

    @classmethod
    def of(cls, judged: Sequence[Judged]) -> Figures:
        failed = [j for j in judged if j.trace.failed]
        leads = tuple(j.lead for j in failed if j.lead is not None)
        false = sum(j.lead is not None for j in judged if not j.trace.failed)
        return cls(
            len(leads), len(failed) - len(leads), false, len(judged) - len(failed) - false,
            sum(j.trace.by_human for j in judged), leads,
        )  # fmt: skip

    @property
    def precision(self) -> float | None:
        return _share(self.true_alarms, self.true_alarms + self.false_alarms)

    @property
    def recall(self) -> float | None:
        return _share(self.true_alarms, self.true_alarms + self.missed)

    @property
    def false_alarm_rate(self) -> float | None:
        """Share of the successes with an alarm."""
        return _share(self.false_alarms, self.false_alarms + self.quiet)

    def to_json(self) -> dict[str, Any]:
        values = dataclasses.asdict(self)
        del values["leads"]
        lead = [float(round(v, 3)) for v in np.percentile(self.leads, (10, 50, 90))] if self.leads else None
        rates = {name: getattr(self, name) for name in ("precision", "recall", "false_alarm_rate")}
        return values | rates | {"lead_seconds_p10_p50_p90": lead}


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None

"""Results of evaluations: rates with their intervals, tables, and what is written of them."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import rich.table

from serl_chunk.actor.stats import EpisodeSummary, RolloutStats
from serl_chunk.evaluation.comparison import Pairs
from serl_chunk.io import format_spread, plural


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


class Difference(NamedTuple):
    """A difference of two proportions, -1..1, with its 95 % interval."""

    mean: float
    low: float
    high: float


def paired_difference(first: np.ndarray, second: np.ndarray) -> Difference:
    """Return mean(second) - mean(first) of paired successes, bool[N] with N > 0, with its 95 % interval.

    Newcombe (1998, paired data), method 8: Wilson's intervals of both, with the pairs' correlation.
    """
    n = len(first)
    both, neither = int((first & second).sum()), int((~first & ~second).sum())
    only_first, only_second = int((first & ~second).sum()), int((second & ~first).sum())
    p1, p2 = float(second.mean()), float(first.mean())
    (l1, u1), (l2, u2) = (wilson_interval(int(x.sum()), n) for x in (second, first))
    product = math.prod((both + only_first, both + only_second, neither + only_first, neither + only_second))
    correlation = (both * neither - only_first * only_second) / math.sqrt(product) if product else 0.0

    def apart(a: float, b: float) -> float:
        return math.sqrt(max(a * a - 2 * correlation * a * b + b * b, 0.0))

    return Difference(p1 - p2, p1 - p2 - apart(p1 - l1, u2 - p2), p1 - p2 + apart(u1 - p1, p2 - l2))


INTERVENTION = "intervention"  # `ended_by` of an episode in which a human acted: the policy alone failed

# Of each episode, in an evaluation's file.
_EPISODE_FIELDS = (
    "seed", "length", "total_reward", "success", "outcome", "ended_by", "human_ticks", "hold_ticks", "starved_ticks",
    "clipped_share", "gated_share", "jerk", "wall_seconds",
)  # fmt: skip


def _fields(episode: EpisodeSummary) -> dict[str, Any]:
    there: dict[str, Any] = {name: text for name in ("fault", "task") if (text := getattr(episode, name))}
    there |= {"conditions": json.loads(episode.conditions)} if episode.conditions else {}
    return {k: getattr(episode, k) for k in _EPISODE_FIELDS} | there


@dataclasses.dataclass(kw_only=True)
class EvalResult(RolloutStats):
    """The episodes of an evaluation."""

    mode: Literal["mean", "sampled"]  # "mean": the deterministic policy; "sampled": with its exploration noise
    arm: str = ""  # ONE or BEST, where the evaluation was to show that one
    seed_base: int  # episode i started from seed_base + i
    policy_version: int
    tick_seconds: float
    starts_repeat: bool | None = None  # whether two resets with one seed agree; None: not compared (a real robot)
    interrupted: bool = False  # whether it ended before its last episode
    until_decided: bool = False  # whether it was to end once one of two policies is better
    repeated: list[EpisodeSummary] = dataclasses.field(default_factory=list)  # by a fault or the operator; done again
    summaries: list[EpisodeSummary] = dataclasses.field(default_factory=list)
    turns: list[int] = dataclasses.field(default_factory=list)
    """Number of each of `summaries` among the episodes of all policies that were evaluated in turns."""

    def add(self, episode: EpisodeSummary, turn: int) -> None:
        self.merge(episode)
        self.summaries.append(episode)
        self.turns.append(turn)

    def take_back(self, turn: int) -> None:
        """Count the episode of a turn no more: it is done again."""
        self.repeated += [e for e, t in zip(self.summaries, self.turns, strict=True) if t == turn]
        self._recount([(e, t) for e, t in zip(self.summaries, self.turns, strict=True) if t != turn])

    def sort(self) -> None:
        """Put the episodes in the order of their turns, and the repeated ones in that of their starts."""
        self.repeated.sort(key=lambda episode: episode.seed)
        self._recount(sorted(zip(self.summaries, self.turns, strict=True), key=lambda pair: pair[1]))

    def _recount(self, episodes: Sequence[tuple[EpisodeSummary, int]]) -> None:
        self.summaries, self.turns = [], []
        for field in dataclasses.fields(RolloutStats):
            setattr(self, field.name, field.default)
        for episode, turn in episodes:
            self.add(episode, turn)

    @property
    def interval(self) -> Interval:
        return wilson_interval(self.successes, self.episodes)

    @property
    def mean_time_s(self) -> float | None:
        """Seconds on the control clock that successful episodes took; None without a success."""
        return self.success_steps / self.successes * self.tick_seconds if self.successes else None

    def figures(self) -> dict[str, Any]:
        rate = {"success_rate": self.success_rate, "n": self.episodes, **self.interval._asdict(), "mode": self.mode}
        arm = {"arm": self.arm} if self.arm else {}
        return rate | {k: getattr(self, k) for k in ("mean_time_s", "mean_length", "mean_return")} | arm

    def to_json(self) -> dict[str, Any]:
        return {
            "success_rate": self.success_rate, "n": self.episodes, "successes": self.successes, **self.figures(),
            "seed_base": self.seed_base, "starts_repeat": self.starts_repeat, "policy_version": self.policy_version,
            "episodes": [_fields(e) for e in self.summaries],
            **({"repeated": [_fields(e) for e in self.repeated]} if self.repeated else {}),
            **({"interrupted": True} if self.interrupted else {}),
        }  # fmt: skip

    def __str__(self) -> str:
        low, high = self.interval
        rate = f"{self.success_rate:.1%} success ({100 * low:.0f} .. {100 * high:.0f} %)"
        return f"{rate} in {plural(self.episodes, 'episode')}, {self.mean_length:.0f} ticks on average"


def _task_lines(results: Sequence[EvalResult]) -> list[str]:
    """A line for each task of a robot that has several, with the success of each result."""
    tasks = dict.fromkeys(e.task for r in results for e in r.summaries if e.task)
    lines = []
    for task in tasks:
        of_task = [[e.success for e in r.summaries if e.task == task] for r in results]
        lines.append(f"{task}: " + ", ".join(f"{sum(of)} of {len(of)}" for of in of_task))
    return lines


def _in_pairs(results: Sequence[EvalResult]) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the successes of two results on the starts of both, bool[N] each; None without any, or of others."""
    if len(results) != 2:
        return None
    first, second = ({e.seed: e.success for e in r.summaries} for r in results)
    if not (seeds := sorted(first.keys() & second.keys())):
        return None
    return np.array([first[seed] for seed in seeds]), np.array([second[seed] for seed in seeds])


def difference_of(results: Sequence[EvalResult]) -> Difference | None:
    """Return the second of two results against the first, on the starts of both; None of any other number.

    The interval of an evaluation that ends once it is decided holds at any end (`comparison`); else it is Newcombe's.
    """
    if (successes := _in_pairs(results)) is None:
        return None
    difference = paired_difference(*successes)
    return Difference(difference.mean, *Pairs.of(*successes).interval) if results[0].until_decided else difference


def is_decided(results: Sequence[EvalResult]) -> bool:
    """Return whether one of two results is better, on the starts of both."""
    return (successes := _in_pairs(results)) is not None and Pairs.of(*successes).decided


def _pair_names(results: Sequence[EvalResult]) -> tuple[Any, Any]:
    """Return what differs between two results: their mode, version or arm."""
    pairs = [(getattr(results[0], n), getattr(results[1], n)) for n in ("mode", "policy_version", "arm")]
    return next((pair for pair in pairs if pair[0] != pair[1]), pairs[0])


def comparison_json(results: Sequence[EvalResult]) -> dict[str, Any]:
    """Return the comparison of two results, as their files have it; empty of any other number."""
    if (successes := _in_pairs(results)) is None or (difference := difference_of(results)) is None:
        return {}
    against, of = _pair_names(results)
    return {"comparison": {
        "of": of, "against": against, **Pairs.of(*successes).to_json(), "until_decided": results[0].until_decided,
        "difference": difference.mean, "low": difference.low, "high": difference.high,
    }}  # fmt: skip


def results_table(results: Sequence[EvalResult]) -> rich.table.Table:
    """Build a table for a terminal with one row per result; below it the difference of two, or how many spread."""
    human = sum(r.human_ticks for r in results)
    failed = sum(e.ended_by == INTERVENTION for r in results for e in r.summaries)
    who = "no interventions" if human == 0 else f"a human acted on {human} ticks: {plural(failed, 'failure')}"
    repeat = all(r.starts_repeat is not False for r in results)
    starts = "held-out starts" if repeat else "starts that ignore the seed"
    table = rich.table.Table(title=f"evaluation, {starts}, {who}")
    starved = any(r.starved_ticks for r in results)
    for column in ("policy", "success", "95 % interval", "n", "time of successes", "length", *["starved"] * starved):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for r in results:
        table.add_row(
            f"{r.mode} (version {r.policy_version}{f', {r.arm}' if r.arm else ''})", f"{100 * r.success_rate:.1f} %",
            f"{100 * r.interval.low:.1f} .. {100 * r.interval.high:.1f} %", str(r.episodes),
            "-" if r.mean_time_s is None else f"{r.mean_time_s:.2f} s", f"{r.mean_length:.1f} ticks",
            *[f"{r.starved_ticks} ticks"] * starved,
        )  # fmt: skip
    if (difference := difference_of(results)) is not None:
        mean, low, high = (100 * x for x in difference)
        one, other = _pair_names(results)
        table.caption = f"{other} against {one}, paired: {mean:+.1f} % (95 % interval {low:+.1f} .. {high:+.1f} %)"
        if results[0].until_decided:
            table.caption += ", decided" if is_decided(results) else ", not decided"
    else:  # a line for each policy of which three checkpoints or more were evaluated
        of: dict[str, list[float]] = {}
        for r in results:
            of.setdefault(f"{r.mode} policy{f', {r.arm}' if r.arm else ''}", []).append(r.success_rate)
        lines = [f"{policy}: {format_spread(rates)}" for policy, rates in of.items() if len(rates) > 2]
        table.caption = "\n".join(lines)
    table.caption = "\n".join(filter(None, [table.caption, *_task_lines(results)])) or None
    return table


def summary_line(result: EvalResult, report: str) -> str:
    """Return the last line, which scripts read."""
    line = f"evaluation: success_rate={result.success_rate:.2f} n={result.episodes} report={report}"
    if result.arm:
        line += f" arm={result.arm}"
    if result.human_ticks:
        line += f" human_ticks={result.human_ticks}"
    if result.starved_ticks:
        line += f" starved_ticks={result.starved_ticks}"
    if faults := sum(bool(e.fault) for e in (*result.repeated, *result.summaries)):
        line += f" faults={faults}"
    if result.starts_repeat is False:
        line += " starts_repeat=no"
    return line

"""What a run has cost and given in the robot's time: its minutes, a human's seconds, successes and their length."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from serl_chunk.runs.metrics import Row, RunMetrics, succeeded_alone


class RobotTime(NamedTuple):
    """Figures of a run's online episodes; resets and pauses are not in them. None where nothing is known."""

    robot_minutes: float  # of ticks, whoever acted
    human_seconds: float  # of a human's segments, idle ticks included
    successes_per_10_min: float | None  # without intervention, in the last `window` judged episodes
    longest_streak: int  # of judged episodes that succeed without intervention, one after another
    success_s: float | None  # median length of those among the last `window`
    demonstration_s: float | None  # median length of the demonstrations


def robot_time(metrics: RunMetrics, hz: float, demo_steps: Sequence[int], window: int) -> RobotTime:
    """Return the figures of a run at `hz` ticks a second, whose demonstrations have `demo_steps` steps each."""
    episodes = metrics["episode"]
    judged = [row for row in episodes if row.get("succeed") is not None and _steps(row)]
    recent = judged[-window:]
    ticks, alone = sum(map(_steps, recent)), [_steps(row) for row in recent if succeeded_alone(row)]
    last = metrics.last() or {}
    return RobotTime(
        robot_minutes=sum(map(_steps, episodes)) / hz / 60,
        human_seconds=(last.get("human_ticks") or 0) / hz,
        successes_per_10_min=len(alone) / (ticks / hz / 600) if ticks else None,
        longest_streak=max((len(list(of)) for won, of in itertools.groupby(judged, succeeded_alone) if won), default=0),
        success_s=statistics.median(alone) / hz if alone else None,
        demonstration_s=statistics.median(demo_steps) / hz if demo_steps else None,
    )


def _steps(row: Row) -> int:
    return int(row.get("episode/l") or 0)

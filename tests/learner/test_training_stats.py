"""training_stats: what is counted of episodes, and what their rows report."""

from __future__ import annotations

from unittest import mock

import pytest
from metric_logs import open_log

from serl_chunk.learner.training_stats import TrainingStats
from serl_chunk.replay.episode import EpisodeStats
from serl_chunk.runs.metrics import Counters, read_metrics


def episode(number: int, *, success: bool | None, human_ticks: int = 0) -> EpisodeStats:
    return EpisodeStats(
        session="left_cell/0",
        episode_id=f"left_cell-{number}",
        length=40,
        episode_return=float(bool(success)),
        success=success,
        human_ticks=human_ticks,
        segments=int(human_ticks > 0),
        decisions=(),
    )


def rows(run, episodes: list[EpisodeStats]) -> tuple[TrainingStats, list[float | None]]:
    """The statistics after `episodes`, and what their rows say of success without intervention."""
    with open_log(run) as log:
        stats = TrainingStats(log, mock.Mock(), 100, lambda: Counters(0, 0, 0), "relative")
        for number, e in enumerate(episodes):
            stats.episode(e, number=number + 1, phase="train")
    return stats, [row["success_without_intervention"] for row in read_metrics(run)["episode"]]


def test_a_helped_episode_is_no_success_without_intervention(tmp_path):
    """All of the last 20 episodes are the denominator, helped ones included."""
    helped = [episode(i, success=True, human_ticks=5) for i in range(20)]
    alone = [episode(i, success=True) for i in range(20, 25)]
    stats, shares = rows(tmp_path, [*helped, *alone])
    assert shares == pytest.approx([0.0] * 20 + [0.05, 0.1, 0.15, 0.2, 0.25])
    assert stats.success_without_intervention == pytest.approx(0.25)


def test_failures_and_successes_alone_are_counted_as_they_are(tmp_path):
    _, shares = rows(tmp_path, [episode(0, success=False), episode(1, success=True), episode(2, success=None)])
    assert shares == [0.0, 0.5, 0.5]  # an outcome that is unknown is not counted


def test_nothing_is_claimed_before_an_episode_is_judged(tmp_path):
    stats, shares = rows(tmp_path, [episode(0, success=None)])
    assert shares == [None]
    assert stats.success_without_intervention is None

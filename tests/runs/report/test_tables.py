"""A run's cost and gain in the robot's time."""

import pytest

from serl_chunk.runs.metrics import RunMetrics
from serl_chunk.runs.report.tables import robot_time


def episode(length: int, succeed: int | None, helped: int = 0) -> dict:
    row = {"kind": "episode", "wall": 1.0, "step": 1, "env_steps": 1, "human_ticks": 90}
    return row | {"episode/l": length, "succeed": succeed, "intervention_count": helped}


def test_figures_are_of_what_the_robot_did():
    rows = [episode(600, 1), episode(300, 1), episode(600, 1, helped=1), episode(200, 1), episode(100, 1),
            episode(400, 1), episode(900, 0), episode(50, None)]  # fmt: skip
    found = robot_time(RunMetrics(episode=rows), 10.0, [150, 100, 250], window=5)
    assert found.robot_minutes == pytest.approx(3150 / 600)
    assert found.human_seconds == 9.0
    assert found.successes_per_10_min == pytest.approx(3 / (2200 / 6000))  # the first of the five was helped
    assert found.longest_streak == 3
    assert (found.success_s, found.demonstration_s) == (20.0, 15.0)


def test_nothing_is_known_of_a_run_without_episodes():
    found = robot_time(RunMetrics(episode=[], eval=[]), 10.0, [], window=5)
    assert found == (0.0, 0.0, None, 0, None, None)

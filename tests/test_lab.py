"""Parts of the rehearsal `benchmarks/lab.py` that need no processes; tests/system/test_lab.py runs it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from serl_chunk_robot.robot_file.config import load

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def _path():
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


def belief(now: float, tips: np.ndarray, openings: tuple[float, float]):
    from support.simulated_operator import Belief, Pose

    poses = tuple(Pose(tip, np.eye(3)) for tip in tips)
    return Belief(now, poses, np.zeros(7), poses, openings)


@pytest.mark.parametrize("driver", ["aloha_ros1", "fake"])
def test_the_robots_file_loads_with_one_camera_and_either_driver(tmp_path, driver):
    from support.lab_cell import robot_file
    from support.lab_experiment import CAMERA, IMAGE_SIZE

    (tmp_path / "robot.toml").write_text(robot_file(5600, driver))
    loaded = load(tmp_path / "robot.toml")
    assert loaded.start == "exploring"
    assert ("lab_arms.py:lab_arms" if driver == "fake" else driver) in loaded.driver
    assert [(camera.name, camera.source.options["size"]) for camera in loaded.cameras] == [(CAMERA, IMAGE_SIZE)]


def test_success_is_both_tips_at_the_meeting_and_both_grippers_closed():
    from support.lab_experiment import MEETING, closed, meets

    shut = np.where(np.arange(14) % 7 == 6, 0.0, MEETING)
    half = np.where(np.arange(14) == 6, 0.0, MEETING)
    turned = shut + 0.3 * (np.arange(14) == 7)
    assert [meets(q) for q in (shut, MEETING, half, turned)] == [True, False, False, False]
    assert [closed({"state": q}) for q in (shut, MEETING, half, turned)] == [True, False, False, True]


def test_the_camera_shows_where_arms_are_and_whether_grippers_are_closed():
    from support.lab_camera import picture
    from support.lab_experiment import IMAGE_SIZE, MEETING

    shut = np.where(np.arange(14) % 7 == 6, 0.0, MEETING)
    pictures = [picture(q, IMAGE_SIZE) for q in (MEETING, shut, shut + 0.2 * (np.arange(14) == 0))]
    assert all(p.shape == (IMAGE_SIZE, IMAGE_SIZE, 3) and p.dtype == np.uint8 for p in pictures)
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert (pictures[a] != pictures[b]).any(axis=2).sum() >= 10


def test_the_operator_leads_the_tips_to_their_goals_then_closes_and_shows_the_result():
    from support.lab_experiment import MEETING, NEAR, tips
    from support.lab_operator import CLOSE, HELP, HELPS_AFTER, MEET, MISS, SHOWS, WATCH, Meeting

    plans = [MEET, MISS, WATCH, HELP]
    task, goals, away = Meeting(lambda: plans.pop(0), np.random.default_rng(0)), tips(MEETING), np.full((2, 3), 0.2)
    task.begin(belief(0.0, away, (1.0, 1.0)))
    aims = task.decide(belief(0.0, away, (1.0, 1.0)))
    assert [aim.button for aim in aims] == [None, None]
    np.testing.assert_array_equal([aim.pose.place for aim in aims], goals)
    assert [aim.button for aim in task.decide(belief(1.0, goals, (1.0, 1.0)))] == [CLOSE, CLOSE]
    task.decide(belief(2.0, goals, (0.0, 0.0)))
    assert task.done is None
    task.decide(belief(2.1 + SHOWS, goals, (0.0, 0.0)))
    assert task.done == MEET
    assert task.decide(belief(3.0, goals, (0.0, 0.0))) is None
    task.begin(belief(4.0, away, (1.0, 1.0)))
    aims = task.decide(belief(4.0, away, (1.0, 1.0)))
    apart = [np.linalg.norm(aim.pose.place - goal) for aim, goal in zip(aims, goals, strict=True)]
    assert apart[0] > NEAR
    assert apart[1] == 0.0, "one arm misses"
    task.begin(belief(5.0, away, (1.0, 1.0)))
    assert task.decide(belief(9.0, away, (1.0, 1.0))) is None
    task.begin(belief(10.0, away, (1.0, 1.0)))
    assert task.decide(belief(10.0, away, (1.0, 1.0))) is None
    assert task.decide(belief(10.1 + HELPS_AFTER, away, (1.0, 1.0))) is not None


@pytest.mark.parametrize(
    ("screen", "keys"),
    [
        ("POLICY\nspace hold", None),
        ("STOPPED\nc, Enter clear the stop", "c Enter"),
        ("HOLD\nEnter go on", "Enter"),
        ("The robot moves in 2 s.\nEnter go on", None),
        ("- the episode has no outcome: press s or f\nEnter go on", "f"),
        ("- a human intervened: a failure\nEnter go on", "f"),
    ],
)
def test_the_operator_answers_what_the_screen_asks_for(screen, keys):
    from support.lab_operator import asked

    assert asked(screen, None) == keys


def test_the_operator_labels_an_episode_by_the_joints():
    from support.lab_experiment import MEETING
    from support.lab_operator import asked

    shut = np.where(np.arange(14) % 7 == 6, 0.0, MEETING)
    assert [asked("the episode has no outcome", q) for q in (shut, MEETING)] == ["s", "f"]

"""Parts of the rehearsal `benchmarks/lab.py` that need no processes; tests/system/test_lab.py runs it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from serl_chunk_robot.robot_file.config import load

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

from support.lab_camera import picture
from support.lab_cell import robot_file
from support.lab_experiment import CAMERA, IMAGE_SIZE, MEETING, NEAR, closed, meets, tips
from support.lab_operator import CLOSE, HELP, HELPS_AFTER, MEET, MISS, SHOWS, WATCH, Meeting, asked
from support.simulated_operator import Belief, Pose

SHUT = np.where(np.arange(14) % 7 == 6, 0.0, MEETING)
HALF = np.where(np.arange(14) == 6, 0.0, MEETING)
TURNED = SHUT + 0.3 * (np.arange(14) == 7)


@pytest.mark.parametrize("driver", ["aloha_ros1", "fake"])
def test_the_robots_file_loads_with_one_camera_and_either_driver(tmp_path, driver):
    (tmp_path / "robot.toml").write_text(robot_file(5600, driver))
    loaded = load(tmp_path / "robot.toml")
    assert loaded.start == "exploring"
    assert ("lab_arms.py:lab_arms" if driver == "fake" else driver) in loaded.driver
    assert [(camera.name, camera.source.options["size"]) for camera in loaded.cameras] == [(CAMERA, IMAGE_SIZE)]


def test_success_is_both_tips_at_the_meeting_and_both_grippers_closed_which_the_camera_shows():
    assert [meets(q) for q in (SHUT, MEETING, HALF, TURNED)] == [True, False, False, False]
    assert [closed({"state": q}) for q in (SHUT, MEETING, HALF, TURNED)] == [True, False, False, True]
    assert [asked("the episode has no outcome", q) for q in (SHUT, MEETING)] == ["s", "f"]  # its operator's labels
    pictures = [picture(q, IMAGE_SIZE) for q in (MEETING, SHUT, SHUT + 0.2 * (np.arange(14) == 0))]
    assert all(p.shape == (IMAGE_SIZE, IMAGE_SIZE, 3) and p.dtype == np.uint8 for p in pictures)
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert (pictures[a] != pictures[b]).any(axis=2).sum() >= 10


def test_the_operator_leads_the_tips_to_their_goals_then_closes_and_shows_the_result():
    plans, goals, away = [MEET, MISS, WATCH, HELP], tips(MEETING), np.full((2, 3), 0.2)
    task = Meeting(lambda: plans.pop(0), np.random.default_rng(0))

    def seen(now: float, places: np.ndarray = away, opening: float = 1.0) -> Belief:
        poses = tuple(Pose(place, np.eye(3)) for place in places)
        return Belief(now, poses, np.zeros(7), poses, (opening, opening))

    task.begin(seen(0.0))
    aims = task.decide(seen(0.0))
    assert [aim.button for aim in aims] == [None, None]
    np.testing.assert_array_equal([aim.pose.place for aim in aims], goals)
    assert [aim.button for aim in task.decide(seen(1.0, goals))] == [CLOSE, CLOSE]
    task.decide(seen(2.0, goals, 0.0))
    assert task.done is None
    task.decide(seen(2.1 + SHOWS, goals, 0.0))
    assert (task.done, task.decide(seen(3.0, goals, 0.0))) == (MEET, None)
    task.begin(seen(4.0))
    apart = [np.linalg.norm(aim.pose.place - goal) for aim, goal in zip(task.decide(seen(4.0)), goals, strict=True)]
    assert apart[0] > NEAR
    assert apart[1] == 0.0, "one arm misses"
    task.begin(seen(5.0))
    assert task.decide(seen(9.0)) is None
    task.begin(seen(10.0))
    assert task.decide(seen(10.0)) is None
    assert task.decide(seen(10.1 + HELPS_AFTER)) is not None


@pytest.mark.parametrize(("screen", "keys"), [
    ("POLICY\nspace hold", None),
    ("STOPPED\nc, Enter clear the stop", "c Enter"),
    ("HOLD\nEnter go on", "Enter"),
    ("The robot moves in 2 s.\nEnter go on", None),
    ("- the episode has no outcome: press s or f\nEnter go on", "f"),
    ("- a human intervened: a failure\nEnter go on", "f"),
])  # fmt: skip
def test_the_operator_answers_what_the_screen_asks_for(screen, keys):
    assert asked(screen, None) == keys

"""The real actor of a served robot is killed, or stands still for 5 s, while the robot moves: whole processes."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest
from ports import free_port as port_of_learner
from robot_moments import HERE, STOOD_STILL, VALIDITY, Cell, Moment
from robot_served import free_port

from serl_chunk_robot.client.client import RobotClient

THIRD = "three lapses within a minute"
MOMENTS = ("stop", "kill", "stop", "kill")


@pytest.mark.slow
def test_a_robot_whose_actor_dies_or_stands_still_brakes_and_stays(tmp_path: Path):
    """Times are not judged: `benchmarks/robot_stops.py` measures them on a quiet machine."""
    done: list[Moment] = []
    port = free_port()
    with closing(Cell(tmp_path, (port, port_of_learner()), 3 * len(MOMENTS), os.environ)) as robot:
        robot.start()
        robot.learn()
        robot.act()
        for waits, how in enumerate(MOMENTS):
            done.append(robot.moment(how, 0.5 + 0.3 * waits))
            with RobotClient(f"{HERE}:{port}", name="watcher", answer=20.0) as watcher:
                assert watcher.next_state()["state"] == "STOPPED"
            if how == "kill" and len(done) < len(MOMENTS):
                robot.act()
        moments, _ = robot.set_points()
    assert len(moments) > 1000
    undisturbed = [m for m in done if STOOD_STILL not in m.word + m.end]
    assert undisturbed, "the machine let the loop run"
    for moment in undisturbed:
        # Each moment lapses: the third one within a minute latches at once, the others after a second.
        words = moment.word, moment.end
        assert words in (("no valid command in time", "no command for a second"), (THIRD, THIRD)), moment
        assert moment.braking < VALIDITY + 0.2, moment
    for moment in done:
        assert moment.speed > 0.05, moment
        assert moment.within, moment
        assert not moment.moved_after, moment

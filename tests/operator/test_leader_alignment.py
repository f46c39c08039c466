"""Leaders that are driven to their arms before an episode, under an operator: what ends a drive, and what follows."""

from __future__ import annotations

import contextlib
import threading
import time

import numpy as np
import pytest
from driven_leader import Served, human_of
from live_desk import Silent
from operator_desk import COUNTDOWN, DT, Desk, Hand, Press
from robot_served import wait

from serl_chunk.console.bindings import Action, ActorState
from serl_chunk.operator.operator import Operator
from serl_chunk.robots.base import DeviceActivity
from serl_chunk.robots.served.operator import ServedOperator

TAKES = 20  # polls of a drive


class Drives:
    """A drive of a leader that takes some polls; what is called is noted with the time and the state."""

    def __init__(self) -> None:
        self.desk: Desk
        self.failed, self.fails, self.left = "", [], 0
        self.calls: list[tuple[str, float]] = []
        self.ticks: list[int] = []

    def begin(self) -> None:
        self.failed, self.left = "", TAKES
        self.calls.append(("begin", self.desk.time))

    def poll(self) -> bool:
        self.left -= 1
        self.ticks.append(self.desk.env.tick)
        if self.left == TAKES // 2 and self.fails:
            self.failed = self.fails.pop(0)
        return self.left > 0 and not self.failed

    def cancel(self) -> None:
        self.left = 0
        self.calls.append(("cancel", self.desk.time))

    def remarks(self):
        return (("left: moves to its arm", "keep your hands off it"),)

    @property
    def going(self) -> bool:
        return self.left > 0

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


class Led(Hand):
    def __init__(self, drives: Drives) -> None:
        super().__init__()
        self.drives = drives

    def poll(self, *_):
        assert not self.drives.going, "a tick while a leader is driven"


@pytest.fixture
def make(make_desk):
    def make(**more):
        drives = Drives()
        drives.desk = make_desk(intervention=Led(drives), length=20, **more)
        return drives.desk, drives

    return make


def test_they_are_driven_after_the_scene_was_confirmed_and_its_countdown(make):
    desk, drives = make(ready="first")
    desk.script = [Press(desk.at(ActorState.WAITING), b"\r")]
    desk.runner.run_episode(0)
    assert (drives.names(), set(drives.ticks)) == (["begin"], {0})
    assert drives.calls[0][1] >= desk.pressed_at + COUNTDOWN - DT
    assert len(desk.sink.steps) > 0


@pytest.mark.parametrize("what", [b" ", Action.HOLD])
def test_a_hold_ends_a_drive_and_going_on_begins_another_one_after_the_countdown(make, what):
    desk, drives = make()
    desk.script = [Press(lambda: drives.going, what), Press(1.0, b"\r")]
    desk.runner.run_episode(0)
    assert drives.names() == ["begin", "cancel", "begin"]
    (_, _), (_, cancelled), (_, again) = drives.calls
    assert again - cancelled >= 1.0 + COUNTDOWN - 2 * DT
    assert len(desk.sink.steps) > 0


@pytest.mark.parametrize(("what", "leaves"), [
    (b" ", "a hold"), (b"x", "a stop"), (Action.STOP, "a stop"), (b"\x03", "the end of the process"),
])  # fmt: skip
def test_what_stops_ends_a_drive_and_the_episode(make, what, leaves):
    desk, drives = make()
    desk.script = [Press(lambda: drives.going, what)]
    desk.runner.run_episode(0)
    assert drives.names() == ["begin", "cancel"]
    assert ("stop" in desk.robot.requests, desk.ended) == (leaves != "a hold", what == b"\x03")
    assert desk.sink.steps == []


def test_a_reset_in_a_drive_is_repeated_and_leaders_are_driven_after_it(make):
    desk, drives = make()
    desk.script = [Press(lambda: drives.going, b"r")]
    desk.runner.run_episode(0)
    assert drives.names() == ["begin", "cancel", "begin"]
    assert len(desk.env.options) == 2
    assert len(desk.sink.steps) > 0


def test_a_failed_drive_holds_and_says_why_and_going_on_begins_another_one(make, caplog):
    desk, drives = make()
    drives.fails = ["left: a hand holds it"]
    desk.script = [Press(desk.at(ActorState.HOLD), b"\r")]
    desk.runner.run_episode(0)
    assert drives.names() == ["begin", "begin"]
    assert "left: a hand holds it. Put them at their arms by hand" in caplog.text
    assert drives.calls[1][1] >= desk.pressed_at + COUNTDOWN - DT
    assert len(desk.sink.steps) > 0


def test_a_lost_device_ends_the_countdown_to_another_drive(make):
    desk, drives = make()
    drives.fails = ["left is lost"]

    def lose() -> bool:
        if desk.word is ActorState.HOLD:
            desk.runner.interventions._source.hands_now = DeviceActivity(lost=("left",))
        return desk.word is ActorState.HOLD

    desk.script = [Press(lose, b"\r")]
    desk.runner.run_episode(0)
    assert drives.names() == ["begin"]
    assert desk.sink.steps == []


def test_a_served_robots_leader_is_driven_by_its_operator_and_a_stop_takes_its_torque(tmp_path):
    with contextlib.ExitStack() as stack:
        cell = Served(stack, tmp_path)
        human, robot = human_of(stack, cell), ServedOperator(cell.config, "console")
        stack.callback(robot.close)
        ends = time.monotonic() + 120

        def operator() -> Operator:
            made = Operator(Silent(), robot, amend=lambda _: None, end=lambda: None, now=time.monotonic, countdown=0.05)
            made.attach(cell.env, human)
            cell.env.stop = made.stopping(lambda: "test" if time.monotonic() > ends else None)
            return made

        stopped, seconds = operator(), []

        def stop() -> None:
            wait(cell.torque, 30)
            began = time.monotonic()
            stopped.request(Action.STOP, "page")
            wait(lambda: not cell.torque())
            seconds.append(time.monotonic() - began)

        thread = threading.Thread(target=stop)
        thread.start()
        assert stopped.reset(cell.env, 0) is None
        thread.join(30)
        assert seconds[0] < 1.0
        cell.operator.request("clear")
        wait(lambda: not robot.stopped)
        while (observation := operator().reset(cell.env, 1)) is None:  # its own connection may not have heard yet
            assert time.monotonic() < ends
        assert not cell.torque()
        leader = human._arms[0].device.read()
        assert leader.drive.phase == "there"
        np.testing.assert_allclose(leader.joints, observation["state"][7:14], atol=0.05)

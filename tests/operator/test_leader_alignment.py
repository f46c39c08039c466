"""Leaders that are driven to their arms before an episode, under an operator: what ends a drive, and what follows."""

from __future__ import annotations

import pytest
from operator_desk import COUNTDOWN, DT, Desk, Hand, Press

from serl_chunk.console.bindings import Action, ActorState
from serl_chunk.robots.base import DeviceActivity

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


@pytest.mark.parametrize("ends", [b" ", Action.HOLD, b"r", "a fault"])
def test_a_drive_that_a_hold_a_reset_or_a_fault_ends_is_followed_by_another_one_after_a_countdown(make, ends, caplog):
    desk, drives = make()
    drives.fails = ["left: a hand holds it"] if ends == "a fault" else []
    goes_on = {b"r": [], "a fault": [Press(desk.at(ActorState.HOLD), b"\r")]}.get(ends, [Press(1.0, b"\r")])
    desk.script = goes_on if drives.fails else [Press(lambda: drives.going, ends), *goes_on]
    desk.runner.run_episode(0)
    assert drives.names() == (["begin", "begin"] if ends == "a fault" else ["begin", "cancel", "begin"])
    assert drives.calls[-1][1] >= desk.pressed_at + COUNTDOWN - 2 * DT
    assert len(desk.env.options) == 1 + (ends == b"r")
    assert len(desk.sink.steps) > 0
    assert ("left: a hand holds it. Put them at their arms by hand" in caplog.text) == (ends == "a fault")


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

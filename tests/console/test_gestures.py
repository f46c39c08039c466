"""Gestures on devices: pedals short and long, both buttons, both grippers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serl_chunk.console.bindings import MOVES, STOPS, Action, bind_gestures
from serl_chunk.console.gestures import LATE, LONG, Gestures

TICK = 0.02
HELD = {"buttons": (True, True), "grippers": (0.05, 0.02)}


class Event(NamedTuple):
    name: str
    pressed: bool
    stamp: float


class Devices:
    """Plays what feet and hands do to `Gestures`, on a clock of its own."""

    def __init__(self, gestures=None) -> None:
        self.now = 100.0
        self.gestures = Gestures(gestures, clock=lambda: self.now)
        self.buttons: Sequence[bool] = (False, False)
        self.grippers: Sequence[float] = (0.8, 0.8)
        self.actions = self.run(TICK)

    def run(self, seconds: float, *events: tuple[str, bool]) -> list[Action]:
        """The actions of `events` now and of the ticks that follow."""
        played = [Event(name, pressed, self.now) for name, pressed in events]
        actions = self.update(played)
        for _ in range(round(seconds / TICK)):
            self.now += TICK
            actions += self.update([])
        return actions

    def update(self, events: list[Event]) -> list[Action]:
        return self.gestures.update(events, buttons=self.buttons, grippers=self.grippers)


def test_pedals_left_and_middle_count_at_once_and_those_that_are_kept_have_another_meaning():
    devices = Devices()
    assert devices.run(0, ("left", True)) == [Action.HOLD]
    assert devices.run(0.9 * LONG) == []
    assert devices.run(0.2 * LONG) == [Action.STOP]
    assert devices.run(2 * LONG, ("left", False)) == []
    assert devices.run(0.5 * LONG, ("left", True)) == [Action.HOLD]
    assert devices.run(2 * LONG, ("left", False)) == []
    assert devices.run(3 * LONG, ("middle", True)) == [Action.GO]
    assert devices.run(LONG, ("middle", False)) == []
    assert devices.run(0.5 * LONG, ("right", True)) == []
    assert devices.run(2 * LONG, ("right", False)) == [Action.SUCCESS]
    assert devices.run(1.1 * LONG, ("right", True)) == [Action.FAILURE]
    assert devices.run(LONG, ("right", False)) == []
    assert devices.run(2 * LONG, ("fourth", True), ("fourth", False)) == []


def test_bounces_count_once_unless_they_stop_and_a_late_tick_takes_the_times_of_the_events():
    devices = Devices()
    assert devices.run(LONG, *[("middle", True), ("middle", False)] * 3) == [Action.GO]
    assert devices.run(LONG, *[("left", True), ("left", False)] * 2) == [Action.HOLD] * 2
    at = devices.now
    devices.now += 3 * LONG
    assert devices.update([Event("right", True, at), Event("right", False, at + 1.1 * LONG)]) == [Action.FAILURE]


@pytest.mark.parametrize(
    ("gesture", "released"),
    [("buttons", (False, True)), ("buttons", (True,)), ("grippers", (0.5, 0.02)), ("grippers", ())],
)
def test_buttons_and_grippers_go_on_once_after_their_time_and_not_before_they_were_released(gesture, released):
    devices = Devices()
    setattr(devices, gesture, HELD[gesture])
    assert devices.run(0.9 * LONG) == []
    assert devices.run(3 * LONG) == [Action.GO]
    setattr(devices, gesture, released)
    assert devices.run(2 * LONG) == []
    setattr(devices, gesture, HELD[gesture])
    assert devices.run(0.5 * LONG) == []
    devices.gestures.empty()
    assert devices.run(3 * LONG) == [], "held before"
    setattr(devices, gesture, released)
    devices.run(TICK)
    setattr(devices, gesture, HELD[gesture])
    assert devices.run(1.1 * LONG) == [Action.GO]
    devices.gestures = Gestures(clock=lambda: devices.now)
    assert devices.run(3 * LONG) == [], "held from the start"


def test_a_gripper_that_trembles_stays_closed():
    devices = Devices()
    devices.grippers = (0.2, 0.05)
    assert devices.run(2 * LONG) == []
    devices.grippers = (0.05, 0.05)
    devices.run(0.5 * LONG)
    devices.grippers = (0.2, 0.05)
    assert devices.run(0.6 * LONG) == [Action.GO]


@pytest.mark.parametrize(("pedal", "began", "then"), [("right", [], []), ("left", [Action.HOLD], [Action.STOP])])
def test_a_change_of_state_forgets_pedals_but_for_a_stop(pedal, began, then):
    devices = Devices()
    assert devices.run(0.5 * LONG, (pedal, True)) == began
    devices.gestures.empty()
    assert devices.run(LONG) == then
    assert devices.run(LONG, (pedal, False)) == []


def test_gestures_can_be_changed():
    devices = Devices(bind_gestures({"success": "pedal_right_long", "failure": "", "go": "mouse_long"}))
    assert devices.run(1.1 * LONG, ("right", True)) == [Action.SUCCESS]
    assert devices.run(LONG, ("right", False), ("middle", True)) == []
    devices.grippers = (0.0, 0.0)
    assert devices.run(2 * LONG) == []
    devices.buttons = (True, True)
    assert devices.run(2 * LONG) == [Action.GO]


@given(st.lists(st.tuples(st.sampled_from(["left", "middle", "right"]), st.booleans(), st.floats(0.0, 1.5))))
def test_a_press_of_the_left_pedal_always_holds_and_never_moves(presses):
    devices = Devices()
    for name, pressed, seconds in presses:
        actions = devices.run(0, (name, pressed))
        if name == "left":
            assert not set(actions) & MOVES
            assert not pressed or Action.HOLD in actions
        assert not (set(actions) & MOVES and set(actions) & STOPS and name == "left")
        devices.run(seconds)


@pytest.mark.parametrize(
    ("why", "pedal", "short", "long"),
    [("state", "left", [Action.HOLD], [Action.STOP]), ("state", "middle", [], []), ("state", "right", [], []),
     ("late", "left", [Action.HOLD], [Action.STOP]), ("late", "middle", [], []),
     ("late", "right", [], [Action.FAILURE])],  # a label moves nothing
)  # fmt: skip
def test_a_press_of_before_the_last_state_stops_alone_and_a_late_one_moves_nothing(why, pedal, short, long):
    devices = Devices()
    pressed = Event(pedal, True, devices.now)
    devices.now += 0.1 if why == "state" else LATE + 0.1
    if why == "state":
        devices.gestures.empty()
    assert devices.update([pressed]) == short
    assert devices.run(1.1 * LONG) == long
    assert devices.run(LONG, (pedal, False)) == []
    expected = {"left": Action.HOLD, "middle": Action.GO, "right": Action.SUCCESS}[pedal]
    assert devices.run(0.1, (pedal, True), (pedal, False)) == [expected]

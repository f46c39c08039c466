"""What keys do: the table, its changes by configuration, repeats, two keys, other threads; and gestures."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serl_chunk.console.bindings import (
    MEANING,
    MOVES,
    REPEAT,
    SECOND_STEP,
    STOPS,
    Action,
    Keys,
    RequestQueue,
    bind_gestures,
    bind_keys,
    help_table,
)
from serl_chunk.console.gestures import LATE, LONG, Gestures
from serl_chunk.types import ConfigError

LATER = 1.1 * REPEAT
TABLE = {  # one key -> its action; the table of the documentation
    "space": Action.HOLD, "enter": Action.GO, "escape": Action.STOP, "x": Action.STOP, "s": Action.SUCCESS,
    "1": Action.SUCCESS, "f": Action.FAILURE, "0": Action.FAILURE, "backspace": Action.DISCARD, "u": Action.UNDO,
    "r": Action.RESET, "g": Action.RESET_NEW, "p": Action.PARK, "y": Action.YES, "ctrl_c": Action.END,
}  # fmt: skip
TWO_KEYS = {("c", "enter"): Action.CLEAR, ("q", "q"): Action.QUIT}
NO_KEYS = ("a", "z", "7", "[", "up", "")
STOPPING = {"escape", "x", "space", "ctrl_c"}


def press(*names: str, gap: float = LATER, keys: Keys | None = None) -> list[Action | None]:
    keys = keys or Keys()
    return [keys.press(name, 10.0 + i * gap) for i, name in enumerate(names)]


def test_each_key_and_each_two_keys_that_come_in_time():
    for name, action in {**TABLE, **dict.fromkeys(NO_KEYS)}.items():
        assert press(name) == [action]
    for names, action in TWO_KEYS.items():
        assert press(*names, gap=0.99 * SECOND_STEP) == [None, action]
        assert press(*names, gap=1.01 * SECOND_STEP)[1] is not action
    assert {*TABLE.values(), *TWO_KEYS.values()} == set(Action) == set(MEANING)
    assert set(bind_keys()) == {*TABLE, "c", "q"}
    changed = Keys(bind_keys({"success": "k", "failure": ("j", "0"), "park": ""}))
    actions = press("k", "j", "0", "s", "1", "f", "p", "ctrl_c", keys=changed)
    assert actions == [Action.SUCCESS, Action.FAILURE, Action.FAILURE, None, None, None, None, Action.END]
    assert len(help_table(changed.bindings, bind_gestures())) < 24, "rows of a terminal"
    assert {TABLE[name] for name in STOPPING} == STOPS
    assert {TABLE[name] for name in ("enter", "r", "g", "y", "p")} | {Action.CLEAR} == MOVES


@pytest.mark.parametrize("name", TABLE)
def test_repeats_count_once_but_for_those_of_a_stop(name):
    repeated = press(*[name] * 20, gap=0.9 * REPEAT)
    assert repeated == [TABLE[name]] * 20 if name in STOPPING else [TABLE[name]] + [None] * 19
    assert press(name, name) == [TABLE[name]] * 2
    assert press(name, "enter", name, gap=0.05)[::2] == [TABLE[name], TABLE[name] if name in STOPPING else None]


def test_a_held_key_does_not_count_again_after_a_change_of_state_and_confirms_nothing():
    keys = Keys()
    assert keys.press("enter", 0.0) is Action.GO
    for i in range(1, 50):
        keys.empty()
        assert keys.press("enter", i * 0.033) is None
    assert press(*["q"] * 20, gap=0.03) == [None] * 20


@pytest.mark.parametrize("first", ["c", "q"])
@pytest.mark.parametrize("other", [*TABLE, *NO_KEYS])
def test_any_other_key_cancels_and_moves_nothing(first, other):
    if (first, other) in TWO_KEYS:
        return
    keys = Keys()
    action = press(first, other, keys=keys)[1]
    assert action is (None if TABLE.get(other) in MOVES else TABLE.get(other))
    confirm = {"c": "enter", "q": "q"}[first]
    assert keys.press(confirm, 10.0 + 2 * LATER) not in (Action.CLEAR, Action.QUIT)


@given(st.lists(st.tuples(st.sampled_from([*TABLE, "c", "q", "z"]), st.floats(0.0, 4.0))))
def test_a_stop_always_gets_through(presses):
    keys, now = Keys(), 0.0
    for name, gap in presses:
        now += gap
        action = keys.press(name, now)
        if name in STOPPING:
            assert action is TABLE[name]
        elif action is Action.GO:
            assert name == "enter"


NO_KEYS_CHANGES = [
    ({"sucess": "s"}, "sucess"), ({"end": "e"}, "end"), ({"success": "S"}, "S"), ({"success": "up"}, "up"),
    ({"success": ("",)}, "''"), ({"success": "é"}, "é"), ({"undo": "ctrl_c"}, "ctrl_c"), ({"success": "f"}, "'f'"),
    ({"success": "k k"}, "'k'"), ({"hold": "enter"}, "'enter'"), ({"stop": ""}, "stop"), ({"hold": ()}, "hold"),
    ({"go": ""}, "go"), ({"stop": "escape"}, "Esc"),
]  # fmt: skip
NO_GESTURES = [
    ({"clear": "pedal_middle", "go": ""}, "pedal_middle"),
    ({"success": "pedal_up"}, "pedal_up"),
    ({"success": "pedal_left"}, "'pedal_left'"),
    ({"stop": "", "go": "pedal_left_long"}, "pedal_left"),
    ({"go": "pedal_right", "success": "", "failure": "", "stop": "pedal_right_long"}, "pedal_right"),
    ({"unknown": "pedal_right"}, "unknown"),
]


@pytest.mark.parametrize(("bind", "changes", "value"), [
    *((bind_keys, *row) for row in NO_KEYS_CHANGES), *((bind_gestures, *row) for row in NO_GESTURES),
])  # fmt: skip
def test_keys_and_gestures_that_cannot_be(bind, changes, value):
    with pytest.raises(ConfigError, match=value) as caught:
        bind(changes, parameter="console.keys")
    assert caught.value.parameter == "console.keys"


def put(inlet: RequestQueue, *requests: tuple[float, Action], source: str = "page") -> list[Action]:
    for now, action in requests:
        inlet.put(action, source, now)
    return list(inlet.actions())


@pytest.mark.parametrize("action", [*sorted(STOPS), Action.SUCCESS])
def test_requests_come_in_order_and_repeats_once_but_for_stops(action):
    inlet = RequestQueue()
    assert put(inlet, (1.0, Action.PARK), (1.1, action)) == [Action.PARK, action]
    assert put(inlet) == []
    assert len(put(inlet, (1.1 + REPEAT - 0.01, action))) == (action in STOPS)
    assert len(put(inlet, (1.1 + 2 * REPEAT, action))) == 1


def test_a_clear_and_a_quit_take_two_requests_of_one_source():
    inlet = RequestQueue()
    assert put(inlet, (1.0, Action.CLEAR)) == []
    assert "Enter" not in inlet.question(1.1)
    assert "go" in inlet.question(1.1)
    assert put(inlet, (1.5, Action.GO), source="phone") == [Action.GO], "not of the other one's clear"
    assert put(inlet, (2.0, Action.GO)) == [Action.CLEAR]
    assert put(inlet, (3.0, Action.QUIT), (3.0 + SECOND_STEP + 0.1, Action.QUIT)) == []
    assert put(inlet, (7.0, Action.QUIT)) == [Action.QUIT]


def test_nothing_that_was_requested_ahead_is_left_but_stops_also_where_they_are_taken():
    inlet = RequestQueue()
    for k, action in enumerate(Action):
        inlet.put(action, "page", float(k))
    inlet.empty()
    assert set(inlet.actions()) == STOPS
    inlet = RequestQueue()
    for action in (Action.SUCCESS, Action.GO, Action.STOP):
        inlet.put(action, "page", 1.0)
    taken = []
    for action in inlet.actions():
        taken.append(action)
        inlet.empty()
    assert taken == [Action.SUCCESS, Action.STOP]


def test_threads_lose_no_stop():
    inlet, count = RequestQueue(), 200
    threads = [
        threading.Thread(target=lambda: [inlet.put(Action.STOP, "page", float(k)) for k in range(count)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    taken = 0
    while any(thread.is_alive() for thread in threads):
        inlet.empty()
        taken += len(list(inlet.actions()))
    assert taken + len(list(inlet.actions())) == 4 * count


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


@pytest.mark.parametrize(("gesture", "released"), [
    ("buttons", (False, True)), ("buttons", (True,)), ("grippers", (0.5, 0.02)), ("grippers", ()),
])  # fmt: skip
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

"""What keys do: the table, its changes by configuration, repeats, actions of two keys, and of other threads."""

from __future__ import annotations

import threading

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
    ({"clear": "pedal_middle", "go": ""}, "pedal_middle"), ({"success": "pedal_up"}, "pedal_up"),
    ({"success": "pedal_left"}, "'pedal_left'"), ({"stop": "", "go": "pedal_left_long"}, "pedal_left"),
    ({"go": "pedal_right", "success": "", "failure": "", "stop": "pedal_right_long"}, "pedal_right"),
    ({"unknown": "pedal_right"}, "unknown"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("bind", "changes", "value"),
    [*((bind_keys, *row) for row in NO_KEYS_CHANGES), *((bind_gestures, *row) for row in NO_GESTURES)],
)
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

"""What keys do: the table, its changes by configuration, repeats, and actions of two keys."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serl_chunk.console.bindings import (
    EFFECTIVE,
    KEYS,
    MEANING,
    MOVES,
    REPEAT,
    SECOND_STEP,
    STOPS,
    Action,
    ActorState,
    Keys,
    bind_gestures,
    bind_keys,
    help_table,
    hints,
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
IN_ALL = {"escape", "x", "ctrl_c", "backspace", "u", "q"}
LABELS, AT_REST = {"s", "1", "f", "0"}, {"enter", "r", "g", "y"}
COUNTS = {  # state -> the first keys of what counts there
    ActorState.WAITING: IN_ALL | AT_REST | {"space"},
    ActorState.POLICY: IN_ALL | LABELS | {"space"},
    ActorState.HUMAN: IN_ALL | LABELS | {"space"},
    ActorState.HOLD: IN_ALL | LABELS | AT_REST | {"space", "p"},
    ActorState.RESET: IN_ALL | {"space"},
    ActorState.STOPPED: IN_ALL | {"c"},
    ActorState.LEARNER_LOST: IN_ALL | LABELS | {"space"},
}


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
    assert {TABLE[name] for name in AT_REST | {"p"}} | {Action.CLEAR} == MOVES


@pytest.mark.parametrize("word", ActorState)
def test_which_keys_count_and_are_shown_in_a_state(word):
    single = {name for name in TABLE if TABLE[name] in EFFECTIVE[word]}
    assert single | {names[0] for names, action in TWO_KEYS.items() if action in EFFECTIVE[word]} == COUNTS[word]
    text = hints(word, bind_keys())
    assert len(text) == len(EFFECTIVE[word])
    assert any("stop" in hint for hint in text[:2])
    assert not [hint for hint in hints(word, bind_keys({"discard": ""})) if "discard" in hint]
    assert set(KEYS) >= EFFECTIVE[word] - {Action.END}


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

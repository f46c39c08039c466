"""What keys do: the table, its changes by configuration, repeats, and actions of two keys."""

from __future__ import annotations

import itertools

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
    second_key,
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


@pytest.mark.parametrize(
    ("names", "actions"),
    [*(((name,), [action]) for name, action in TABLE.items()), *(((name,), [None]) for name in NO_KEYS),
     *((names, [None, action]) for names, action in TWO_KEYS.items())],
)  # fmt: skip
def test_each_key_and_each_two_keys(names, actions):
    assert press(*names) == actions


def test_the_table_is_complete():
    assert {*TABLE.values(), *TWO_KEYS.values()} == set(Action) == set(MEANING)
    assert set(bind_keys()) == {*TABLE, "c", "q"}


@pytest.mark.parametrize("word", ActorState)
def test_every_key_in_every_state(word):
    """Which keys count in a state; the two of `c`, Enter and of `q`, `q` together."""
    single = {name for name in TABLE if TABLE[name] in EFFECTIVE[word]}
    assert single | {names[0] for names, action in TWO_KEYS.items() if action in EFFECTIVE[word]} == COUNTS[word]


def test_nothing_moves_where_the_robot_moves_or_is_stopped():
    for word in (ActorState.POLICY, ActorState.HUMAN, ActorState.RESET, ActorState.LEARNER_LOST):
        assert not EFFECTIVE[word] & MOVES
    assert EFFECTIVE[ActorState.STOPPED] & MOVES == {Action.CLEAR}


def test_no_action_and_no_key_both_stops_and_moves():
    assert not STOPS & MOVES
    for first, second in itertools.product(bind_keys(), repeat=2):
        actions = press(first, second)
        assert not (set(actions) & STOPS and bind_keys()[second] in MOVES and actions[0] is None)
    for name in {"escape", "x", "space", "ctrl_c"}:
        assert not {press(first, name)[1] for first in bind_keys()} & MOVES


@pytest.mark.parametrize("name", sorted(set(TABLE) - {"escape", "x", "space", "ctrl_c"}))
def test_repeats_count_once(name):
    assert press(*[name] * 20, gap=0.9 * REPEAT) == [TABLE[name]] + [None] * 19
    assert press(name, name) == [TABLE[name]] * 2


@pytest.mark.parametrize("name", ["escape", "x", "space", "ctrl_c"])
def test_each_press_that_stops_counts(name):
    keys = Keys()
    assert press(name, "enter", name, gap=0.05, keys=keys)[::2] == [TABLE[name]] * 2


def test_a_held_key_does_not_count_again_after_a_change_of_state_and_confirms_nothing():
    keys = Keys()
    assert keys.press("enter", 0.0) is Action.GO
    for i in range(1, 50):
        keys.empty()
        assert keys.press("enter", i * 0.033) is None
    assert press(*["q"] * 20, gap=0.03) == [None] * 20


@pytest.mark.parametrize(("names", "action"), TWO_KEYS.items())
def test_the_second_key_comes_in_time_or_not_at_all(names, action):
    assert press(*names, gap=0.99 * SECOND_STEP) == [None, action]
    assert press(*names, gap=1.01 * SECOND_STEP)[1] is not action


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


@pytest.mark.parametrize(("first", "action", "second"), [("c", Action.CLEAR, "Enter"), ("q", Action.QUIT, "q")])
def test_a_first_key_shows_its_second_one_until_the_state_changes(first, action, second):
    keys = Keys()
    keys.press(first, 0.0)
    assert keys.begun(1.0) is action
    assert keys.begun(SECOND_STEP) is None
    assert second in second_key(action, keys.bindings)
    keys.empty()
    assert keys.begun(1.0) is None


@given(st.lists(st.tuples(st.sampled_from([*TABLE, "c", "q", "z"]), st.floats(0.0, 4.0))))
def test_a_stop_always_gets_through(presses):
    keys, now = Keys(), 0.0
    for name, gap in presses:
        now += gap
        action = keys.press(name, now)
        if TABLE.get(name) in STOPS:
            assert action is TABLE[name]
        elif action is Action.GO:
            assert name == "enter"


def test_keys_can_be_changed():
    keys = Keys(bind_keys({"success": "k", "failure": ("j", "0"), "park": ""}))
    assert press("k", "j", "0", "s", "1", "f", "p", keys=keys) == [
        Action.SUCCESS, Action.FAILURE, Action.FAILURE, None, None, None, None,
    ]  # fmt: skip
    assert keys.press("ctrl_c", 50.0) is Action.END


NO_KEYS_CHANGES = [
    ({"sucess": "s"}, "sucess"), ({"end": "e"}, "end"), ({"success": "S"}, "S"), ({"success": "up"}, "up"),
    ({"success": ("",)}, "''"), ({"success": "é"}, "é"), ({"undo": "ctrl_c"}, "ctrl_c"), ({"success": "f"}, "'f'"),
    ({"success": "k k"}, "'k'"), ({"hold": "enter"}, "'enter'"), ({"stop": ""}, "stop"), ({"hold": ()}, "hold"),
    ({"go": ""}, "go"), ({"stop": "escape"}, "Esc"),
]  # fmt: skip
NO_GESTURES = [
    ({"clear": "pedal_middle", "go": ""}, "pedal_middle"), ({"clear": "mouse_long", "go": ""}, "mouse_long"),
    ({"success": "pedal_up"}, "pedal_up"), ({"success": "s"}, "'s'"), ({"success": "pedal_left"}, "'pedal_left'"),
    ({"stop": "", "go": "pedal_left_long"}, "pedal_left"),
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


def test_help_shows_all_and_fits_a_terminal():
    lines = help_table(bind_keys({"success": "k"}), bind_gestures())
    assert max(map(len, lines)) <= 80
    assert len(lines) < 24
    text = "\n".join(lines)
    for meaning in MEANING.values():
        assert meaning in text
    for shown in ("k  ", "Esc or x", "c, Enter", "q, q", "Ctrl-C", "pedal right 1 s", "both mouse buttons 1 s"):
        assert shown in text
    assert len(help_table(bind_keys())) == len(Action) + 1


@pytest.mark.parametrize("word", ActorState)
def test_hints_are_of_what_counts(word):
    text = hints(word, bind_keys())
    assert len(text) == len(EFFECTIVE[word])
    assert any("stop" in hint for hint in text[:2])
    assert [hint for hint in hints(word, bind_keys({"discard": ""})) if "discard" in hint] == []
    assert set(KEYS) >= EFFECTIVE[word] - {Action.END}

"""Keys and gestures of the operator, the actions that they are mapped to, and the states in which those count.

The table is the same on every input: a terminal, a page, a pedal, buttons of devices (`gestures.py`).
"""

from __future__ import annotations

import collections
import enum
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from serl_chunk.config.fields import require
from serl_chunk.console.keys import CTRL_C, NAMED
from serl_chunk.types import ShownRobot
from serl_chunk_robot.devices.evdev_device import PAD_NAMES as GAMEPAD

REPEAT = 0.3  # seconds from the newest press of a key in which another one is a repeat
SECOND_STEP = 3.0  # seconds for the second key of two


class ActorState(enum.StrEnum):
    """The state of an actor, as one word for the operator."""

    WAITING = "WAITING"
    POLICY = "POLICY"
    HUMAN = "HUMAN"
    HOLD = "HOLD"
    RESET = "RESET"
    STOPPED = "STOPPED"
    LEARNER_LOST = "LEARNER LOST"


class Action(enum.StrEnum):
    """What an operator can request."""

    HOLD = "hold"
    GO = "go"
    STOP = "stop"
    CLEAR = "clear"
    SUCCESS = "success"
    FAILURE = "failure"
    DISCARD = "discard"
    UNDO = "undo"
    RESET = "reset"
    RESET_NEW = "reset_new"
    PARK = "park"
    QUIT = "quit"
    YES = "yes"
    END = "end"  # Ctrl-C


STOPS = frozenset({Action.HOLD, Action.STOP, Action.END})
MOVES = frozenset({Action.GO, Action.CLEAR, Action.RESET, Action.RESET_NEW, Action.PARK, Action.YES})
"""Actions after which the robot may move."""
NEEDED = (Action.STOP, Action.HOLD, Action.GO)  # no configuration may leave these without a key
_TWO_STEPS = {Action.CLEAR: Action.GO, Action.QUIT: Action.QUIT}  # action -> that of the key which confirms it

MEANING = {
    Action.HOLD: "hold at once",
    Action.STOP: "stop: brake, latched, ends the episode",
    Action.GO: "scene ready, go on",
    Action.CLEAR: "clear the stop",
    Action.SUCCESS: "success, ends the episode",
    Action.FAILURE: "failure, ends the episode",
    Action.DISCARD: "discard the episode",
    Action.UNDO: "undo the last label or discard",
    Action.RESET: "repeat the reset",
    Action.RESET_NEW: "repeat the reset with a new object",
    Action.PARK: "park",
    Action.QUIT: "end after this episode, parked",
    Action.YES: "yes, to a question",
    Action.END: "stop, and end the actor",
}

_ALWAYS = frozenset({Action.STOP, Action.END, Action.QUIT, Action.DISCARD, Action.UNDO})
_LABELS = frozenset({Action.SUCCESS, Action.FAILURE})
_AT_REST = frozenset({Action.GO, Action.RESET, Action.RESET_NEW, Action.YES})
EFFECTIVE: Mapping[ActorState, frozenset[Action]] = {
    ActorState.WAITING: _ALWAYS | _AT_REST | {Action.HOLD},
    ActorState.POLICY: _ALWAYS | _LABELS | {Action.HOLD},
    ActorState.HUMAN: _ALWAYS | _LABELS | {Action.HOLD},
    ActorState.HOLD: _ALWAYS | _LABELS | _AT_REST | {Action.HOLD, Action.PARK},  # a second hold ends a countdown
    ActorState.RESET: _ALWAYS | {Action.HOLD},
    ActorState.STOPPED: _ALWAYS | {Action.CLEAR},
    ActorState.LEARNER_LOST: _ALWAYS | _LABELS | {Action.HOLD},
}
"""State -> the actions that count in it; all others do nothing there."""

KEYS: Mapping[Action, tuple[str, ...]] = {
    Action.HOLD: ("space",),
    Action.GO: ("enter",),
    Action.STOP: ("escape", "x"),
    Action.CLEAR: ("c",),
    Action.SUCCESS: ("s", "1"),
    Action.FAILURE: ("f", "0"),
    Action.DISCARD: ("backspace",),
    Action.UNDO: ("u",),
    Action.RESET: ("r",),
    Action.RESET_NEW: ("g",),
    Action.PARK: ("p",),
    Action.QUIT: ("q",),
    Action.YES: ("y",),
}
GESTURES: Mapping[Action, tuple[str, ...]] = {
    Action.HOLD: ("pedal_left",),
    Action.GO: ("pedal_middle", "mouse_long", "grippers_long"),
    Action.STOP: ("pedal_left_long",),
    Action.SUCCESS: ("pedal_right",),
    Action.FAILURE: ("pedal_right_long",),
}
GESTURE_NAMES = (
    *(f"pedal_{side}{long}" for side in ("left", "middle", "right") for long in ("", "_long")),
    "mouse_long",
    "grippers_long",
)
Changes = Mapping[str, str | Sequence[str]]
"""Action -> its keys in place of the usual ones: `{"success": "s 1"}` or `{"success": ("s", "1")}`; empty for none."""


def bind_keys(changes: Changes | None = None, *, parameter: str = "keys") -> dict[str, Action]:
    """Return key -> action, where `changes` replace the keys of single actions.

    Buttons of a gamepad are keys as well, which no terminal has.

    Raises ConfigError, which names `parameter`, for an unknown action or key, a key of two actions, no key to hold or
    go on, and no key to stop in addition to Esc, which a network may delay.
    """
    # fmt: off
    names = f"one printable character in lower case, {', '.join(NAMED)}, of a gamepad {', '.join(GAMEPAD)}"
    bound = _bind(KEYS, changes, parameter, _is_key, names)
    typed = {name: action for name, action in bound.items() if name not in GAMEPAD}
    for action in NEEDED:
        require(action in typed.values(), parameter,
            f"no key (got {action}='', expected one or more). Give {action} a key")
    require(_inputs(Action.STOP, typed) != ["escape"], parameter,
        "stop has Esc alone, which a network may delay (got 'escape', expected another key). Add one, as x")
    return {**bound, CTRL_C: Action.END}


def bind_gestures(changes: Changes | None = None, *, parameter: str = "gestures") -> dict[str, Action]:
    """Return gesture -> action, where `changes` replace the gestures of single actions.

    Raises ConfigError, which names `parameter`, for an unknown action or gesture, a gesture of two actions, a gesture
    that clears a stop, and a pedal that stops when it is pressed for one time and moves for another.
    """
    # fmt: off
    bound = _bind(GESTURES, changes, parameter, GESTURE_NAMES.__contains__, ", ".join(GESTURE_NAMES))
    for name, action in bound.items():
        require(action is not Action.CLEAR, parameter, f"{name} clears a stop, expected a key. Leave clear out")
        other = bound.get(f"{name}_long")
        both = other is not None and len({action, other} & MOVES) == len({action, other} & STOPS) == 1
        require(not both, parameter,
            f"{name} both stops and moves (got {action} and {other}, expected one kind). Choose another pedal")
    return bound


def _is_key(name: str) -> bool:
    return name in NAMED or name in GAMEPAD or (len(name) == 1 and "!" <= name <= "~" and name == name.lower())


def _bind(
    usual: Mapping[Action, tuple[str, ...]], changes: Changes | None, parameter: str, valid: Callable[[str], bool],
    names: str,
) -> dict[str, Action]:  # fmt: skip
    # fmt: off
    table = dict(usual)
    for text, inputs in (changes or {}).items():
        require(text in KEYS, parameter,
            f"unknown action (got {text!r}, expected one of {', '.join(KEYS)}). Choose one of these")
        table[Action(text)] = tuple(inputs.split() if isinstance(inputs, str) else inputs)
    bound: dict[str, Action] = {}
    for action, inputs in table.items():
        for name in inputs:
            require(valid(name), parameter,
                f"{action} has an unknown input (got {name!r}, expected {names}). Choose another one")
            require(name not in bound, parameter,
                f"{name!r} is mapped twice (got {bound.get(name)} and {action}, expected one action). Change one")
            bound[name] = action
    return bound


class Keys:
    """Presses of keys to actions: repeats count once, and two actions take two keys.

    A key that is held, or lies under something, sends presses for ever: a press within `REPEAT` seconds of the one
    before is a repeat, however long that goes on. Actions that stop are exempt: each press of theirs counts.
    """

    def __init__(self, bindings: Mapping[str, Action] | None = None) -> None:
        self.bindings = bind_keys() if bindings is None else bindings
        self._pressed: dict[str, float] = {}  # key -> its newest press
        self._begun: Action | None = None  # an action whose first key came
        self._until = 0.0  # when that one is given up

    def press(self, name: str, now: float) -> Action | None:
        """Return the action of a key pressed at `now` (monotonic seconds); None for none, or none yet.

        After the first key of two, every other key cancels it. One that could move the robot does nothing else.
        """
        action = self.bindings.get(name)
        begun = self.begun(now)
        if action in STOPS:
            self._begun = None
            return action
        before = self._pressed.get(name)
        self._pressed[name] = now
        if before is not None and now - before < REPEAT:
            return None
        self._begun = None
        if begun is not None and action is _TWO_STEPS[begun]:
            return begun
        if action in _TWO_STEPS:
            self._begun, self._until = action, now + SECOND_STEP
            return None
        return None if begun is not None and action in MOVES else action

    def begun(self, now: float) -> Action | None:
        return self._begun if now < self._until else None

    def question(self, now: float) -> str:
        """Return what to press after a first key, as a question to the operator; empty where none was pressed."""
        if (begun := self.begun(now)) is None:
            return ""
        second = shown_inputs(_TWO_STEPS[begun], self.bindings, 1)
        return f"{MEANING[begun]}? {second} confirms, any other key cancels"

    def empty(self) -> None:
        """Forget a first key. Call it at each change of state, for a key typed ahead moves nothing."""
        self._begun = None  # but not the presses: a key that is held must not count again


BUTTONS = {action.value: action for action in Action}  # a source's keys: one for each action


class RequestQueue:
    """Requested actions until the control loop takes them. Only `put` may be called from other threads.

    Each source is as a keyboard of its own: repeats count once, and two actions need two requests (`Keys`).
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: collections.deque[tuple[Action, str, float, float, ShownRobot | None]] = collections.deque()
        self.shown: ShownRobot | None = None  # at the newest action, as its source was shown it
        self._keys: dict[str, Keys] = {}  # source -> what it pressed
        self._emptied, self._emptied_at = False, -1.0

    def put(
        self, action: Action, source: str, now: float, seen: float | None = None, robot: ShownRobot | None = None
    ) -> None:
        """Request an action at `now` (monotonic seconds).

        Args:
            seen: of when the state was that it is requested for, where that is older: what came later than `seen`, a
                change or a stop, drops it.
            robot: that was shown to the person who requested it.
        """
        self._waiting.append((action, source, now, now if seen is None else seen, robot))

    def actions(self) -> Iterator[Action]:
        """Yield what was requested since the last call. After `empty`, only stops of this call are left."""
        self._emptied = False
        for _ in range(len(self._waiting)):
            if not self._waiting:  # emptied meanwhile
                return
            requested, source, stamp, seen, robot = self._waiting.popleft()
            if (self._emptied or seen < self._emptied_at) and requested not in STOPS:
                continue
            action = self._keys.setdefault(source, Keys(BUTTONS)).press(requested.value, stamp)
            if action is not None:
                self.shown = robot
                yield action

    def empty(self) -> None:
        """Drop what was requested so far, but for stops. Call it at each change of state."""
        self._emptied, self._emptied_at = True, self._clock()
        for keys in self._keys.values():
            keys.empty()
        for _ in range(len(self._waiting)):
            entry = self._waiting.popleft()
            if entry[0] in STOPS:
                self._waiting.append(entry)

    def question(self, now: float) -> str:
        """Return what a source has to confirm; empty where none has begun an action of two requests."""
        return next(filter(None, (keys.question(now) for keys in self._keys.values())), "")


def hints(word: ActorState, bindings: Mapping[str, Action]) -> list[str]:
    """Return `key meaning` of the keys that count in a state, those that stop first."""
    return [
        f"{keys} {action.replace('_', ' ')}"
        for action in MEANING
        if action in EFFECTIVE[word] and (keys := _with_second(action, bindings))
    ]


def help_table(keys: Mapping[str, Action], gestures: Mapping[str, Action] | None = None) -> list[str]:
    """Return lines of keys, meanings and gestures in columns, the head first; a further gesture has its own line."""
    rows = [("key", "does", "hands on devices")]
    for action, meaning in MEANING.items():
        first, *more = [shown_input(name) for name in _inputs(action, gestures or {})] or [""]
        rows.append((_with_second(action, keys), meaning, first))
        rows += [("", "", gesture) for gesture in more]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


_SHOWN = {
    "escape": "Esc",
    "enter": "Enter",
    "backspace": "Backspace",
    CTRL_C: "Ctrl-C",
    "mouse_long": "both mouse buttons 1 s",
    "grippers_long": "leader grippers closed 1 s",
}


def shown_input(name: str) -> str:
    """Return a key or gesture for a reader: `Esc`, `pedal right 1 s`."""
    return _SHOWN.get(name) or name.replace("_long", " 1 s").replace("_", " ")


def _inputs(action: Action, bindings: Mapping[str, Action]) -> list[str]:
    return [name for name, bound in bindings.items() if bound is action]


def shown_inputs(action: Action, bindings: Mapping[str, Action], most: int | None = None) -> str:
    """Return what requests an action, for a reader: `s or 1`; empty for nothing."""
    return " or ".join(map(shown_input, _inputs(action, bindings)[:most]))


def _with_second(action: Action, bindings: Mapping[str, Action]) -> str:
    keys = shown_inputs(action, bindings)
    return f"{keys}, {shown_inputs(_TWO_STEPS[action], bindings, 1)}" if keys and action in _TWO_STEPS else keys

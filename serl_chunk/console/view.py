"""The operator's view: one big word for the state, and what the operator needs to know of it.

`lines` draws it for a terminal, `plain` for an output that has no room for a state.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from rich.cells import cell_len, set_cell_size
from rich.color import ColorSystem
from rich.style import Style

from serl_chunk.console.bindings import ActorState
from serl_chunk.io import format_duration
from serl_chunk.types import ShownRobot

COLOURS = {
    ActorState.WAITING: "white",
    ActorState.POLICY: "green",
    ActorState.HUMAN: "blue",
    ActorState.HOLD: "yellow",
    ActorState.RESET: "magenta",
    ActorState.STOPPED: "red",
    ActorState.LEARNER_LOST: "red",
}
RINGS = (ActorState.STOPPED, ActorState.LEARNER_LOST)  # entering one of these rings
OLD = 0.2  # seconds; a camera's frame that is older is marked
_NONE = "-"
_PLAIN, _BOLD, _DIM = Style(), Style(bold=True), Style(dim=True)
_QUESTION, _ALARM = Style(bold=True, reverse=True), Style(color="red", bold=True)
_UNCONFIRMED = Style(color="red", bold=True, reverse=True)


class Obstacle(NamedTuple):
    """A reason why the robot cannot start, and its remedy."""

    what: str
    remedy: str


class Proposed(NamedTuple):
    """A chunk that waits for the operator's approval."""

    number: int  # differs from that of every other one
    actions: np.ndarray  # float32[H, A], robot units


class ConsoleState(NamedTuple):
    """What the console shows; None where there is no value yet. Plain values alone: drawing happens on a thread."""

    word: ActorState
    countdown: float | None = None  # seconds until the robot moves
    rate: float | None = None  # ticks per second
    rate_target: float | None = None
    lateness_p50: float | None = None  # ms
    lateness_p99: float | None = None  # ms
    cameras: tuple[tuple[str, float], ...] = ()  # name, age of the newest frame in seconds
    policy_version: int | None = None
    policy_age: float | None = None  # seconds
    unacknowledged: int | None = None  # steps
    human_share: float | None = None  # of ticks, 0 to 1
    successes: float | None = None  # per ten minutes
    since_pause: float | None = None  # minutes
    obstacles: tuple[Obstacle, ...] = ()
    outcome: str = ""  # of the last episode
    progress: str = ""  # how far a recording or an evaluation is
    question: str = ""
    notice: str = ""  # what the operator should look at
    proposed: Proposed | None = None
    alarm: str = ""  # what the operator has to do at once
    robot: ShownRobot | None = None  # None: no server moves it


def lines(state: ConsoleState, columns: int, rows: int, keys: Sequence[str] = ()) -> list[str]:
    """Return the view as lines with ANSI colours, none wider than `columns`, `rows` at most.

    On a small terminal the size of the word goes first, then the keys, the table and the last obstacles. `keys`: what
    keys do in this state, as of `bindings.hints`.
    """
    countdown = _seconds(state)
    alarm = [_line(columns, (part, _UNCONFIRMED)) for part in textwrap.wrap(state.alarm, columns)]
    moves = "" if countdown is None else f"The robot moves in {countdown} s."
    texts = ((moves, _BOLD), (held_for(state), _BOLD), (state.notice, _ALARM), (state.question, _QUESTION),
             (state.progress, _BOLD))  # fmt: skip
    notes = [_line(columns, each) for each in texts if each[0]]
    notes += [""] * bool(notes)
    table, hints = _table(state, columns), ["", *_hints(tuple(keys), columns)] if keys else []
    word = [*alarm, *_big_word(state.word, countdown, columns)]
    if len(word) + len(notes) + len(_obstacles(state.obstacles, columns, rows)) + len(table) + len(hints) > rows:
        word = [*alarm, _line(columns, (f" {state.word} ", _style(state.word)))]
    out = [*word, *notes][:rows]
    out += _obstacles(state.obstacles, columns, rows - len(out))
    out += table[: rows - len(out)]
    return out + (hints if len(out) + len(hints) <= rows else [])


def plain(state: ConsoleState, before: ConsoleState | None = None) -> str:
    """Return one line for a log; empty where nothing has changed since `before` that is worth one."""
    if before is not None and _worth_a_line(state) == _worth_a_line(before):
        return ""
    values = {
        "alarm": state.alarm,
        "word": state.word,
        "moves_in_s": _seconds(state),
        "question": state.question,
        "cannot_start": "; ".join(f"{o.what} ({o.remedy})" for o in state.obstacles),
        "last_episode": state.outcome,
        "progress": state.progress,
        "policy_version": state.policy_version,
        "unacknowledged": state.unacknowledged,
    }
    texts = ((name, str(value)) for name, value in values.items() if value not in (None, ""))
    quoted = (f"{name}={t if t.isprintable() and ' ' not in t else repr(t)}" for name, t in texts)
    return f"console: {' '.join(quoted)}"


def rings(state: ConsoleState, before: ConsoleState | None = None) -> bool:
    """Return whether the operator's attention is needed: each second before a motion, a stop, a question, a notice, an
    alarm.
    """
    seconds, earlier = _seconds(state), None if before is None else _seconds(before)
    changed = before is None or state.word != before.word
    news = (getattr(state, name) not in ("", getattr(before, name, "")) for name in ("question", "notice", "alarm"))
    return (seconds is not None and seconds != earlier) or (changed and state.word in RINGS) or any(news)


def held_for(state: ConsoleState) -> str:
    """Return who holds the robot at its server, and for how long; empty where it is not held there."""
    robot = state.robot
    return "" if robot is None or not robot.held_by else f"held by {robot.held_by} for {robot.held_s:.0f} s"


def _seconds(state: ConsoleState) -> int | None:
    return None if state.countdown is None else math.ceil(state.countdown)


def _worth_a_line(state: ConsoleState) -> tuple[object, ...]:
    return state.alarm, state.word, state.countdown is None, state.question, state.obstacles, state.outcome


def _line(columns: int, *parts: tuple[str, Style]) -> str:
    """Return texts with their styles in a row, cut at `columns`. Rich's own tables take a hundred times as long."""
    out, left = "", columns
    for text, style in parts:
        if not text.isprintable():
            text = "".join(c if c.isprintable() else "?" for c in text)
        width = cell_len(text)
        if width > left:
            text, width = set_cell_size(text, left), left
        out, left = out + style.render(text, color_system=ColorSystem.STANDARD), left - width
    return out


def _style(word: ActorState) -> Style:
    return Style(color=None if "NO_COLOR" in os.environ else COLOURS[word], bold=True, reverse=True)


@functools.lru_cache(maxsize=64)
def _big_word(word: ActorState, countdown: int | None, columns: int) -> list[str]:
    """The word in blocks, twice as wide where that fits, with the seconds of a countdown to its right."""
    text = word.value if countdown is None else f"{word}  {min(countdown, 99)}"
    rows = [".".join(_FONT[letter].split("/")[i] for letter in text) for i in range(5)]
    for scale in (2, 1):
        if scale * len(rows[0]) <= columns:
            break
    else:
        return [_line(columns, (f" {text} ", _style(word)))]
    runs = [[(mark, len(list(run)) * scale) for mark, run in itertools.groupby(row)] for row in rows]
    out = [_line(columns, *((" " * n, _style(word) if mark == "#" else _PLAIN) for mark, n in row)) for row in runs]
    return [*out, ""]


@functools.lru_cache(maxsize=64)
def _hints(keys: tuple[str, ...], columns: int) -> list[str]:
    """Keys, none of them cut by the end of a line."""
    rows = [""]
    for hint in keys:
        longer = f"{rows[-1]}   {hint}" if rows[-1] else hint
        if len(longer) <= columns:
            rows[-1] = longer
        else:
            rows.append(hint)
    return [_line(columns, (row, _DIM)) for row in rows]


@functools.lru_cache(maxsize=64)
def _obstacles(obstacles: tuple[Obstacle, ...], columns: int, rows: int) -> list[str]:
    """One line for each, or its remedy on lines of its own where that is too long."""
    if not obstacles or rows < 1:
        return []
    out = [_line(columns, ("Cannot start because:", _ALARM))]
    for i, (what, remedy) in enumerate(obstacles):
        if len(what) + len(remedy) + 4 <= columns:
            own = [_line(columns, (f"- {what}: ", _BOLD), (remedy, _PLAIN))]
        else:
            own = [_line(columns, (f"- {what}:", _BOLD))]
            own += [_line(columns, (f"    {part}", _PLAIN)) for part in textwrap.wrap(remedy, max(columns - 4, 8))]
        if len(out) + len(own) > rows - (i < len(obstacles) - 1):
            return [*out, _line(columns, (f"  and {len(obstacles) - i} more", _BOLD))][:rows]
        out += own
    return out + [""] * (len(out) < rows)


def cells(state: ConsoleState) -> tuple[tuple[str, str], ...]:
    """Return the table of the state: names and values."""
    s = state
    target = "" if s.rate_target is None else f" of {s.rate_target:g}"
    age = "" if s.policy_age is None else f", {format_duration(s.policy_age)} old"
    lateness = ((s.lateness_p50, "p50 {:.1f} ms"), (s.lateness_p99, "p99 {:.1f} ms"))
    return (
        ("rate", _value(s.rate, f"{{:.1f}}{target} Hz")),
        ("policy", _value(s.policy_version, "version {}") + age),
        ("lateness", ", ".join(_value(*each) for each in lateness if each[0] is not None) or _NONE),
        ("unacknowledged", _value(s.unacknowledged, "{:,} steps")),
        ("human", _value(s.human_share, "{:.0%} of ticks")),
        ("successes", _value(s.successes, "{:.1f} in 10 minutes")),
        ("last pause", _value(s.since_pause, "{:.0f} min ago")),
        ("last episode", s.outcome or _NONE),
    )


def _table(state: ConsoleState, columns: int) -> list[str]:
    table = cells(state)
    out = [
        _line(columns, (f"{a:12}", _DIM), (f"{x:24}  ", _PLAIN), (f"{b:16}", _DIM), (y, _PLAIN))
        for (a, x), (b, y) in zip(table[::2], table[1::2], strict=True)
    ]
    return out + _cameras(state.cameras, columns)


def _cameras(cameras: Sequence[tuple[str, float]], columns: int) -> list[str]:
    """As many a line as fit, for an age that is cut off would look young."""
    rows: list[list[tuple[str, Style]]] = []
    width = columns
    for name, seconds in cameras:
        text = f"{name} {seconds:.2f} s   "
        if width + cell_len(text) > columns:
            rows.append([(f"{'' if rows else 'cameras':12}", _DIM)])
            width = 12
        rows[-1].append((text, _ALARM if seconds > OLD else _PLAIN))
        width += cell_len(text)
    return [_line(columns, *row) for row in rows]


def _value(value: float | None, form: str) -> str:
    return _NONE if value is None else form.format(value)


_FONT = {
    " ": "../../../../..",
    "A": ".##./#..#/####/#..#/#..#",
    "C": ".###/#.../#.../#.../.###",
    "D": "###./#..#/#..#/#..#/###.",
    "E": "###/#../##./#../###",
    "G": ".###/#.../#.##/#..#/.###",
    "H": "#..#/#..#/####/#..#/#..#",
    "I": "#/#/#/#/#",
    "L": "#../#../#../#../###",
    "M": "#...#/##.##/#.#.#/#...#/#...#",
    "N": "#..#/##.#/#.##/#..#/#..#",
    "O": ".##./#..#/#..#/#..#/.##.",
    "P": "###./#..#/###./#.../#...",
    "R": "###./#..#/###./#.#./#..#",
    "S": ".###/#.../.##./...#/###.",
    "T": "###/.#./.#./.#./.#.",
    "U": "#..#/#..#/#..#/#..#/.##.",
    "W": "#...#/#...#/#.#.#/##.##/#...#",
    "Y": "#.#/#.#/.#./.#./.#.",
    "0": ".##./#..#/#..#/#..#/.##.",
    "1": ".#./##./.#./.#./###",
    "2": "###./...#/.##./#.../####",
    "3": "###./...#/.##./...#/###.",
    "4": "#..#/#..#/####/...#/...#",
    "5": "####/#.../###./...#/###.",
    "6": ".##./#.../###./#..#/.##.",
    "7": "####/...#/..#./.#../.#..",
    "8": ".##./#..#/.##./#..#/.##.",
    "9": ".##./#..#/.###/...#/.##.",
}
"""Character -> its five rows; # is filled."""

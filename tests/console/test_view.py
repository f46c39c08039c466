"""The operator's view: every state at 80x24 and less, what it marks, and its lines without a terminal."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from serl_chunk.console.bindings import ActorState, bind_keys, hints
from serl_chunk.console.view import ConsoleState, Obstacle, lines, plain, rings
from serl_chunk.types import ShownRobot

COLUMNS, ROWS = 79, 23  # what `Screen` leaves of 80x24
STATE = ConsoleState(
    ActorState.POLICY, rate=49.94, rate_target=50.0, lateness_p50=0.21, lateness_p99=1.44,
    cameras=(("cam_high", 0.02), ("cam_left_wrist", 0.03), ("cam_right_wrist", 0.41)), policy_version=1234,
    policy_age=75.0, unacknowledged=1017, human_share=0.125, successes=8.2, since_pause=12.4,
    outcome="success (operator)",
)  # fmt: skip
OBSTACLES = (
    Obstacle("robot server: no lease", "Start it with serl-chunk-robot serve, or pass another address"),
    Obstacle("spacemouse /dev/hidraw3: no such device", "Plug it in, or choose actor.intervention=none"),
    Obstacle("camera cam_left_wrist: newest frame 3.2 s old", "Check its cable"),
)
FULL = STATE._replace(
    countdown=2.4,
    question="Place the cube. Enter goes on",
    notice="look: Q fell from 0.8 to 0.2",
    obstacles=OBSTACLES,
    progress="demonstration 3 of 20",
)
UNCONFIRMED = FULL._replace(
    alarm="THE ROBOT DID NOT CONFIRM. Press the hardware emergency stop.",
    robot=ShownRobot(7, "actor", "p", "desk", 12.4),
)


def text(out: list[str]) -> list[str]:
    return [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in out]


def draw(state: ConsoleState, columns: int = COLUMNS, rows: int = ROWS) -> list[str]:
    return lines(state, columns, rows, hints(state.word, bind_keys()))


def test_everything_of_a_state_is_shown():
    whole = "\n".join(text(draw(FULL)))
    for shown in (
        "49.9 of 50 Hz", "p50 0.2 ms, p99 1.4 ms", "cam_high 0.02 s", "cam_right_wrist 0.41 s", "version 1234",
        "1,017 steps", "12% of ticks", "8.2 in 10 minutes", "12 min ago", "success (operator)", "demonstration 3 of 20",
        "moves in 3 s", "Enter goes on", "Cannot start because:",
        *(part for obstacle in OBSTACLES for part in obstacle),
    ):  # fmt: skip
        assert shown in whole, shown


@pytest.mark.parametrize(("columns", "rows"), [(COLUMNS, ROWS), (COLUMNS, 2), (40, 12)])
def test_an_alarm_comes_first_rings_and_is_a_line_of_the_log(columns, rows):
    drawn = " ".join(text(draw(UNCONFIRMED, columns, rows)))
    assert drawn.startswith(UNCONFIRMED.alarm)
    assert rings(UNCONFIRMED, FULL)
    assert UNCONFIRMED.alarm in plain(UNCONFIRMED, FULL)


STATES = st.builds(
    ConsoleState, st.sampled_from(ActorState), st.none() | st.floats(0, 1e6),
    *[st.none() | st.floats(allow_nan=False, allow_infinity=False)] * 4,
    st.lists(st.tuples(st.text(max_size=30), st.floats(0, 1e9)), max_size=6).map(tuple),
    st.none() | st.integers(0), st.none() | st.floats(0, 1e6), st.none() | st.integers(0),
    *[st.none() | st.floats(0, 1e6)] * 3,
    st.lists(st.builds(Obstacle, st.text(max_size=90), st.text(max_size=200)), max_size=5).map(tuple),
    st.text(max_size=100), st.text(max_size=100),
)  # fmt: skip


@given(STATES, st.integers(1, 200), st.integers(1, 60))
def test_any_state_fits_any_terminal(state, columns, rows):
    out = draw(state, columns, rows)
    assert len(out) <= rows
    shown = text(out)
    assert all(line.isprintable() for line in shown)
    # A key or word that is wider than the terminal is cut, too.
    assert max(map(cell_len, shown), default=0) <= columns
    assert "\n" not in plain(state)


def test_what_rings():
    def rang(before: dict | None, now: dict) -> bool:
        return rings(STATE._replace(**now), None if before is None else STATE._replace(**before))

    assert not rang(None, {})
    for word in ActorState:
        assert rang({"word": ActorState.RESET}, {"word": word}) == (word in ("STOPPED", "LEARNER LOST"))
        assert not rang({"word": word}, {"word": word})
    for before, now, expected in (
        ({}, {"countdown": 3.0}, True), ({"countdown": 3.0}, {"countdown": 2.1}, False),
        ({"countdown": 2.1}, {"countdown": 1.9}, True), ({"countdown": 0.1}, {}, False),
        ({}, {"notice": "look"}, True), ({"notice": "look"}, {"notice": "look", "rate": 1.0}, False),
        ({"notice": "look"}, {}, False), ({}, {"question": "park?"}, True),
        ({"question": "park?"}, {"question": "park?"}, False),
    ):  # fmt: skip
        assert rang(before, now) is expected, (before, now)

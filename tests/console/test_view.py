"""The operator's view: every state at 80x24 and less, what it marks, and its lines without a terminal."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from serl_chunk.console import view
from serl_chunk.console.bindings import ActorState, bind_keys, hints
from serl_chunk.console.view import OLD, ConsoleState, Obstacle, lines, plain, rings
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
    countdown=2.4, question="Place the cube. Enter goes on", notice="look: Q fell from 0.8 to 0.2",
    obstacles=OBSTACLES, progress="demonstration 3 of 20",
)  # fmt: skip
UNCONFIRMED = FULL._replace(
    alarm="THE ROBOT DID NOT CONFIRM. Press the hardware emergency stop.",
    robot=ShownRobot(7, "actor", "p", "desk", 12.4),
)
NEEDED = ("rate", "lateness", "policy", "unacknowledged", "human", "successes", "last pause", "last episode")


def text(out: list[str]) -> list[str]:
    """The lines without colours."""
    return [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in out]


def draw(state: ConsoleState, columns: int = COLUMNS, rows: int = ROWS) -> list[str]:
    return lines(state, columns, rows, hints(state.word, bind_keys()))


def test_everything_of_a_state_is_shown():
    cameras = tuple((f"camera_of_the_arm_{i}", 0.1 * i) for i in range(9))
    whole = "\n".join(text(draw(FULL)) + text(draw(STATE._replace(cameras=cameras))))
    shown = (
        "49.9 of 50 Hz", "p50 0.2 ms, p99 1.4 ms", "cam_high 0.02 s", "cam_left_wrist 0.03 s", "cam_right_wrist 0.41 s",
        "version 1234, 1:15 old", "1,017 steps", "12% of ticks", "8.2 in 10 minutes", "12 min ago",
        "success (operator)", "demonstration 3 of 20", "moves in 3 s",
        "Place the cube. Enter goes on", "Cannot start because:", *(part for each in OBSTACLES for part in each),
        *(f"{name} {age:.2f} s" for name, age in cameras), *NEEDED,
    )  # fmt: skip
    assert [part for part in shown if part not in whole] == []


@pytest.mark.parametrize(("columns", "rows"), [(COLUMNS, ROWS), (COLUMNS, 2), (40, 12)])
def test_an_alarm_comes_first_rings_and_is_a_line_of_the_log(columns, rows):
    drawn = " ".join(text(draw(UNCONFIRMED, columns, rows)))
    assert drawn.startswith(UNCONFIRMED.alarm)
    assert rings(UNCONFIRMED, FULL)
    assert UNCONFIRMED.alarm in plain(UNCONFIRMED, FULL)


def test_the_word_is_large_and_coloured(monkeypatch):
    out = draw(STATE._replace(word=ActorState.HOLD))[:5]
    blocks = [re.sub(r"\x1b\[[0-9;]*7[0-9;]*m( *)\x1b\[0m", lambda m: "#" * len(m[1]), line)[::2] for line in out]
    assert blocks[::4] == ["#  #  ##  #   ### ", "#  #  ##  ### ### "]
    for word, colour in ((ActorState.STOPPED, 31), (ActorState.LEARNER_LOST, 31), (ActorState.POLICY, 32)):
        assert f"\x1b[1;7;{colour}m" in draw(STATE._replace(word=word))[0]
    monkeypatch.setenv("NO_COLOR", "1")
    view._big_word.cache_clear()
    assert "\x1b[1;7m" in draw(STATE)[0]
    view._big_word.cache_clear()


def test_an_old_camera_is_marked():
    marked = [line for line in draw(STATE) if "cam_" in line]
    assert re.findall(r"\x1b\[1;31m(\w+)", "".join(marked)) == ["cam_right_wrist"]
    young = STATE._replace(cameras=(("a", OLD),))
    assert "31m" not in "".join(draw(young)[5:])


@pytest.mark.parametrize("rows", [1, 8, 12, 20])
def test_a_small_terminal_shows_the_word_and_as_many_obstacles_as_fit(rows):
    out = text(draw(FULL, 40, rows))
    assert len(out) <= rows
    assert "POLICY" in out[0] or rows >= 20
    if 8 <= rows < 12:
        assert any(re.search(r"and \d more", line) for line in out)
    scene = Obstacle("the scene is not confirmed", "look at it, then press Enter")
    out = text(draw(ConsoleState(ActorState.WAITING, obstacles=(scene,)), 100, 15))
    assert "WAITING" in out[0]
    assert any("Enter go" in line for line in out), "the word becomes small before the keys go"


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


def test_plain_lines_come_with_what_changed():
    assert plain(STATE).startswith("console: word=POLICY last_episode='success (operator)' policy_version=1234")
    assert plain(STATE._replace(rate=12.0, unacknowledged=3, policy_version=1235), STATE) == ""
    held = STATE._replace(word=ActorState.LEARNER_LOST)
    assert "word='LEARNER LOST'" in plain(held, STATE)
    moving = held._replace(countdown=3.0)
    for state, shown in (
        (held._replace(question="park? y"), "question='park? y'"), (held._replace(outcome="a\nb"), r"'a\nb'"),
        (held._replace(obstacles=OBSTACLES), "robot server: no lease (Start it"), (moving, "moves_in_s=3"),
    ):  # fmt: skip
        assert shown in plain(state, held)
    assert plain(moving._replace(countdown=2.0), moving) == ""


@pytest.mark.parametrize("word", ActorState)
def test_there_are_letters_for_every_countdown_and_the_keys_take_three_lines(word):
    for seconds in (None, 0.1, 9.5, 10.0, 98.9, 1000.0):
        out = text(draw(STATE._replace(word=word, countdown=seconds)))
        assert len(out) > 10
        assert "stop" in "".join(out[-3:])


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

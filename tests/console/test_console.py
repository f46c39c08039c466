"""The console as an actor uses it: keys of a pseudo terminal to actions, states to the terminal or the log."""

from __future__ import annotations

import logging
import time

import pytest
from ptys import Pty, wait_until

from serl_chunk.console.bindings import Action, ActorState, bind_gestures
from serl_chunk.console.console import OperatorConsole
from serl_chunk.console.view import ConsoleState
from serl_chunk.types import ShownRobot

STATE = ConsoleState(ActorState.POLICY, rate=50.0)


@pytest.fixture
def pty(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    pty = Pty()
    pty.look()
    yield pty
    pty.close()


@pytest.fixture
def console(pty):
    with OperatorConsole(gestures=bind_gestures(), source=pty.slave, target=pty.slave) as console:
        assert console.terminal is not None
        yield console


def next_actions(console: OperatorConsole, count: int = 1) -> list[Action]:
    found: list[Action] = []
    wait_until(lambda: found.extend(console.actions()) or len(found) >= count, 10.0)
    return found


def shows(pty: Pty, part: str, there: bool = True) -> None:
    assert wait_until(lambda: (part in "\n".join(pty.picture.shown())) is there), pty.picture.shown()


def begun(console: OperatorConsole) -> bool:
    return wait_until(lambda: list(console.actions()) or console._keys.begun(time.monotonic()))


def test_keys_become_actions_and_two_keys_one(pty, console):
    pty.type(b"s")
    assert next_actions(console) == [Action.SUCCESS]
    pty.type(b"c")
    assert begun(console)
    console.show(STATE)
    shows(pty, "clear the stop? Enter confirms")
    pty.type(b"\r")
    assert next_actions(console) == [Action.CLEAR]
    console.show(STATE)
    shows(pty, "clear the stop?", False)
    pty.type(b"\x03")
    assert next_actions(console) == [Action.END]


def test_a_key_is_of_the_robot_that_stood_on_the_screen_when_it_was_pressed(pty, console):
    pty.type(b"\r")
    assert next_actions(console) == [Action.GO]
    assert console.shown is None, "nothing stood there"
    seen = ShownRobot(3, "actor", "p", "desk", 12.0)
    console.show(ConsoleState(ActorState.HOLD, robot=seen))
    shows(pty, "held by desk for 12 s")
    assert wait_until(lambda: console.terminal.screen.content == seen)
    time.sleep(0.3)  # a second press that comes sooner is a repeat
    pty.type(b"\r")
    assert wait_until(lambda: console.terminal._keys)
    console.show(ConsoleState(ActorState.HOLD, robot=seen._replace(generation=4)))  # held again meanwhile
    assert wait_until(lambda: console.terminal.screen.content != seen)
    assert next_actions(console) == [Action.GO]
    assert console.shown == seen


def test_a_change_of_state_leaves_of_what_was_typed_stops_alone(pty, console):
    pty.type(b"f\rsx ")
    assert wait_until(lambda: len(console.terminal._keys) == 5)
    found = []
    for action in console.actions():
        found.append(action)
        console.empty()
    assert found == [Action.FAILURE, Action.STOP, Action.HOLD]
    pty.type(b"\rc\rx")
    assert wait_until(lambda: len(console.terminal._keys) == 4)
    console.empty()
    assert next_actions(console) == [Action.STOP]
    pty.type(b"q")
    assert begun(console)
    console.empty()
    assert console._keys.begun(time.monotonic()) is None
    pty.type(b"u")
    assert next_actions(console) == [Action.UNDO]


def test_the_state_the_lines_and_on_request_the_table_of_keys_are_shown_and_a_stop_rings(pty, console):
    console.show(STATE)
    shows(pty, "50.0 Hz")
    shows(pty, "? help")
    console.line("an episode ended")
    assert wait_until(lambda: pty.picture.shown()[0] == "an episode ended")
    assert pty.picture.bells == 0
    console.show(STATE._replace(word=ActorState.STOPPED))
    assert wait_until(lambda: pty.picture.bells == 1)
    shows(pty, "c, Enter clear")
    pty.type(b"?")
    assert wait_until(lambda: list(console.actions()) or console._help)
    console.show(STATE)
    shows(pty, "hands on devices")
    shows(pty, "leader grippers closed 1 s")
    assert any("POLICY" in line for line in pty.picture.shown()[:2])
    assert max(map(len, pty.picture.shown())) < 80


def test_a_closed_terminal_holds_once_and_the_loop_goes_on(pty, console, caplog):
    pty.hang_up()
    assert next_actions(console) == [Action.HOLD]
    assert "terminal closed" in caplog.text
    for _ in range(10):
        console.show(STATE)
        console.line("x")
        console.empty()
        assert list(console.actions()) == []


def test_without_a_terminal_changes_are_lines_of_the_log(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    with (tmp_path / "out").open("w") as file, OperatorConsole(source=file.fileno(), target=file.fileno()) as console:
        assert console.terminal is None
        for word in (ActorState.POLICY, ActorState.POLICY, ActorState.HOLD):
            console.show(STATE._replace(word=word, rate=49.0))
            console.empty()
            console.line("not twice")
            assert list(console.actions()) == []
    assert [r.message.split()[1] for r in caplog.records] == ["word=POLICY", "word=HOLD"]
    assert (tmp_path / "out").read_text() == ""

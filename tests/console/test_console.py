"""The console on a pseudo terminal: keys to actions, frames and lines to a screen, and the terminal as it was."""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
import termios
import threading
import time

import pytest
from ptys import Picture, Pty, wait_until

from serl_chunk.console import screen as screen_module
from serl_chunk.console.bindings import Action, ActorState, bind_gestures
from serl_chunk.console.console import OperatorConsole
from serl_chunk.console.screen import LINES, USUAL_SIZE, Screen, terminal_size
from serl_chunk.console.terminal import Terminal
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


# The terminal becomes the controlling one of a session of its own, as a shell's does.
SESSION = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
CHILD = (
    SESSION
    + """
import os, signal, sys, time
from serl_chunk.console.terminal import Terminal
from serl_chunk.console.keys import CTRL_C
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup pytest` leaves it ignored
terminal = Terminal()
def wait():
    sys.stderr.write("ready\\n")
    while True:
        for key in terminal.read():
            sys.stderr.write(key.name + "\\n")
            if key.name == CTRL_C:
                return
        time.sleep(0.005)
"""
)
WAYS_OUT = {  # name -> (its code, the exit status)
    "close": ("terminal.close(); terminal.close()", 0),
    "exception": ("with terminal: 1 / 0", 1),
    "unhandled": ("1 / 0", 1),
    "SIGTERM": ("wait()", -signal.SIGTERM),
    "SIGHUP": ("wait()", -signal.SIGHUP),
    "SIGINT": ("wait()", -signal.SIGINT),
    "handler": ("signal.signal(signal.SIGTERM, lambda *_: (terminal.close(), os._exit(7))); wait()", 7),
    "forked": (
        "pid = os.fork()\nif pid == 0:\n    os.kill(os.getpid(), signal.SIGTERM)\n    time.sleep(60)\n"
        "os.waitpid(pid, 0)\nimport termios\nassert not termios.tcgetattr(0)[3] & termios.ECHO\nterminal.close()",
        0,
    ),
}


@pytest.fixture
def terminal(pty):
    with Terminal(pty.slave, pty.slave) as terminal:
        yield terminal


@pytest.fixture
def start(pty):
    children = []

    def start(code: str) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-c", code], stdin=pty.slave, stdout=pty.slave, stderr=subprocess.PIPE, text=True,
            start_new_session=True, env={**os.environ, "TERM": "xterm"},
        )  # fmt: skip
        children.append((child, threading.Timer(60, child.kill)))
        children[-1][1].start()
        return child

    yield start
    for child, timer in children:
        timer.cancel()
        child.kill()
        child.communicate()


def names(terminal: Terminal, count: int) -> list[str]:
    keys = []
    wait_until(lambda: keys.extend(terminal.read()) or len(keys) >= count, 10.0)
    return [key.name for key in keys]


@pytest.mark.parametrize("way", WAYS_OUT)
def test_the_terminal_is_restored_on_every_way_out(pty, start, way):
    before = pty.attributes()
    code, status = WAYS_OUT[way]
    child = start(CHILD + code)
    if "wait()" in code:
        assert child.stderr.readline() == "ready\n"
        assert not pty.attributes()[3] & (termios.ECHO | termios.ICANON | termios.ISIG)
        child.send_signal(getattr(signal, way, signal.SIGTERM))
    _, errors = child.communicate(timeout=60)
    assert child.returncode == status, errors
    assert pty.attributes() == before
    assert wait_until(lambda: pty.picture.modes == {"?25"})


def test_control_keys_neither_stop_nor_end_a_process_and_output_is_as_it_was(pty, start):
    child = start(CHILD + "wait()\nterminal.close()\ntime.sleep(0.1)")
    assert child.stderr.readline() == "ready\n"
    modes = pty.attributes()
    assert not modes[3] & (termios.ECHO | termios.ISIG | termios.ICANON | termios.IEXTEN)
    assert not modes[0] & (termios.IXON | termios.ICRNL)
    assert modes[1] & termios.OPOST
    pty.type(b"\x1a\x13\x11\x1c\x16\x0f" + b"s")  # Ctrl-Z, -S, -Q, -\, -V, -O
    assert child.stderr.readline() == "s\n"
    pty.type(b"\x03")
    assert child.stderr.readline() == "ctrl_c\n"
    _, errors = child.communicate(timeout=60)
    assert (child.returncode, errors) == (0, "")


def test_keys_come_with_their_times(pty, terminal):
    before = time.monotonic()
    pty.type(b"s\r \x7f")
    assert names(terminal, 4) == ["s", "enter", "space", "backspace"]
    pty.type(b"f")
    assert wait_until(lambda: terminal._keys)
    (key,) = terminal.read()
    assert key.name == "f"
    assert before <= key.stamp <= time.monotonic()
    assert terminal.read() == []
    pty.type(b"\x1b[A\x1b")  # a lone Esc needs no further byte
    assert names(terminal, 1) == ["escape"]


def test_what_was_typed_before_the_start_is_dropped_and_what_is_typed_at_the_end_reaches_no_shell(pty):
    def without_lines() -> None:
        attributes = pty.attributes()
        attributes[3] &= ~termios.ICANON
        attributes[6][termios.VMIN] = attributes[6][termios.VTIME] = 0
        termios.tcsetattr(pty.slave, termios.TCSANOW, attributes)

    without_lines()
    pty.type(b"\rs")
    with Terminal(pty.slave, pty.slave) as terminal:
        pty.type(b"u")
        assert names(terminal, 1) == ["u"]
        pty.type(b"rm -r\n")
    without_lines()
    assert os.read(pty.slave, 100) == b""


def test_a_stuck_terminal_still_has_keys_is_restored_and_leaves_no_descriptors(pty):
    pty.look_away()
    before, descriptors = pty.attributes(), len(os.listdir("/proc/self/fd"))
    terminal = Terminal(pty.slave, pty.slave)
    for i in range(300):
        terminal.screen.line("x" * 1000)
        terminal.screen.show(lambda columns, rows, i=i: [str(i)])
    pty.type(b"x")
    assert names(terminal, 1) == ["x"]
    begin = time.monotonic()
    terminal.close()
    assert time.monotonic() - begin < 5
    assert pty.attributes() == before
    for _ in range(3):
        Terminal(pty.slave, pty.slave).close()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_process_in_the_background_reads_no_keys(start):
    code = SESSION + (
        "import os, sys\nfrom serl_chunk.console.terminal import is_usable\n"
        "sys.stderr.write(f'{is_usable(0, 1)}\\n')\npid = os.fork()\n"
        "if pid == 0:\n    os.setpgid(0, 0)\n    sys.stderr.write(f'{is_usable(0, 1)}\\n')\n    os._exit(0)\nos.wait()"
    )
    _, errors = start(code).communicate(timeout=60)
    assert errors == "True\nFalse\n"


BLOCKED = 5.0  # seconds; a caller that waits for a stuck terminal takes longer than this


@pytest.fixture
def small():
    small = Pty(40, 10)
    yield small
    small.close()


@pytest.fixture
def screen(small):
    screen = Screen(small.slave)
    small.look()
    yield screen
    screen.close()


def frame(*lines: str):
    return lambda columns, rows: list(lines)


def comes(small: Pty, *lines: str) -> None:
    assert wait_until(lambda: small.picture.shown() == list(lines)), small.picture.shown()


def test_a_frame_gets_the_room_there_is(small, screen):
    sizes = []
    screen.show(lambda *size: sizes.append(size) or ["x"])
    assert wait_until(lambda: sizes == [(39, 9)])
    comes(small, "x")
    small.resize(20, 8)
    small.picture = Picture(20, 8)
    small.picture.feed(b"as the terminal wraps what was there before")
    screen.show(lambda *size: sizes.append(size) or ["y"])
    assert wait_until(lambda: sizes[-1] == (19, 7))
    comes(small, "y")
    small.resize(30, 8)
    screen.bell()
    assert wait_until(lambda: sizes[-1] == (29, 7))
    unsized = Pty(0, 0)
    assert terminal_size(unsized.slave) == USUAL_SIZE
    unsized.close()
    with open(os.devnull) as file:
        assert terminal_size(file.fileno()) == USUAL_SIZE


def test_a_frame_that_is_not_replaced_is_marked_and_a_drawing_that_fails_is_shown(small, screen, monkeypatch):
    monkeypatch.setattr(screen_module, "STALE", 0.5)
    screen.show(frame("POLICY"))
    comes(small, "POLICY")
    comes(small, "POLICY", "not updated for 1 s")
    screen.show(frame("HOLD"))
    comes(small, "HOLD")
    screen.show(lambda columns, rows: [1 / 0])
    assert wait_until(lambda: "cannot be shown: ZeroDivi" in "".join(small.picture.shown()))
    screen.show(frame("again"))
    comes(small, "again")


@pytest.mark.parametrize("stopped", [False, True])
def test_a_stuck_terminal_blocks_no_caller_and_shows_the_newest_frame_later(small, stopped):
    """Its buffer full as its user does not read, or stopped by XOFF."""
    screen = Screen(small.slave)
    if stopped:
        termios.tcflow(small.slave, termios.TCOOFF)
        small.look()
    begin = time.monotonic()
    for i in range(2000):
        screen.show(frame(*[f"{i} " + "x" * 30] * 9))
        screen.line(f"line {i}")
        screen.bell()
        if i % 100 == 0:
            time.sleep(0.001)
    assert time.monotonic() - begin < BLOCKED
    assert wait_until(lambda: screen.line("x" * 1000) or not select.select([], [small.slave], [], 0)[1])
    begin = time.monotonic()
    for _ in range(100):
        screen.show(frame("older"))
        screen.line("x")
    assert time.monotonic() - begin < BLOCKED
    screen.show(frame("newest"))
    screen.line("last line")
    if stopped:
        termios.tcflow(small.slave, termios.TCOON)
    else:
        small.look()
    assert wait_until(lambda: small.picture.shown()[-2:] == ["last line", "newest"])
    screen.close()


def test_lines_for_a_stuck_terminal_are_bounded_and_counted(small):
    termios.tcflow(small.slave, termios.TCOOFF)
    screen = Screen(small.slave)
    for i in range(LINES + 100):
        screen.line(f"line {i}")
    screen.line("end")
    termios.tcflow(small.slave, termios.TCOON)
    small.look()
    assert wait_until(lambda: small.picture.shown()[-1:] == ["end"])
    every = [*small.picture.above, *small.picture.shown()]
    (count,) = [int(line.split()[0]) for line in every if "dropped" in line]
    left = [line for line in every if line.startswith("line ")]
    assert count + len(left) == LINES + 100
    assert len(left) >= LINES - 1
    screen.close()


def test_another_programs_non_blocking_mode_is_waited_for(small):
    os.set_blocking(small.slave, False)
    screen = Screen(small.slave)
    screen.line("x" * 30_000)
    threading.Timer(0.2, small.look).start()
    screen.show(frame("end"))
    assert wait_until(lambda: small.picture.shown()[-1:] == ["end"])
    assert sum(line.count("x") for line in [*small.picture.above, *small.picture.shown()]) == 30_000
    screen.close()

"""Keys from a terminal in raw mode, and the terminal as it was on every way out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import termios
import threading
import time

import pytest
from ptys import Pty, wait_until

from serl_chunk.console.terminal import CLOSED, Terminal

# The terminal becomes the controlling one of a session of its own, as a shell's does.
SESSION = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
CHILD = SESSION + """
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
"""  # fmt: skip
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
        "os.waitpid(pid, 0)\nimport termios\nassert not termios.tcgetattr(0)[3] & termios.ECHO\nterminal.close()", 0,
    ),
}  # fmt: skip


@pytest.fixture
def pty():
    pty = Pty()
    pty.look()
    yield pty
    pty.close()


@pytest.fixture
def terminal(pty):
    with Terminal(pty.slave, pty.slave) as terminal:
        yield terminal


@pytest.fixture
def start(pty):
    """Starts Python code in a session of its own on the terminal, for a minute at most."""
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


def test_what_is_typed_ahead_is_dropped_but_for_stops(pty, terminal):
    pty.type(b"\rsx f\rc\r")
    pty.type(b"s" * 10_000)
    terminal.empty(keep={"x", "space"})
    pty.type(b"u")
    assert wait_until(lambda: [k.name for k in terminal._keys] == ["x", "space", "u"])
    for _ in range(200):
        pty.type(b"s")
        terminal.empty()
    assert terminal.read() == []
    pty.type(b"u")
    assert wait_until(lambda: "u" in [k.name for k in terminal.read()])


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


def test_a_closed_terminal_is_one_event_and_no_error(pty, terminal):
    pty.hang_up()
    assert names(terminal, 1) == [CLOSED]
    for _ in range(20):
        terminal.screen.show(lambda columns, rows: ["x"])
        terminal.screen.line("x")
        terminal.empty()
        assert terminal.read() == []
        time.sleep(0.002)
    terminal.close()


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

"""Frames and lines on a terminal that reads, does not read, changes its size, or goes."""

from __future__ import annotations

import os
import select
import termios
import threading
import time

import pytest
from ptys import Picture, Pty, wait_until

from serl_chunk.console import screen as screen_module
from serl_chunk.console.screen import LINES, USUAL_SIZE, Screen, terminal_size

BLOCKED = 5.0  # seconds; a caller that waits for a stuck terminal takes longer than this


@pytest.fixture
def pty():
    pty = Pty(40, 10)
    yield pty
    pty.close()


@pytest.fixture
def screen(pty):
    screen = Screen(pty.slave)
    pty.look()
    yield screen
    screen.close()


def frame(*lines: str):
    return lambda columns, rows: list(lines)


def comes(pty: Pty, *lines: str) -> None:
    assert wait_until(lambda: pty.picture.shown() == list(lines)), pty.picture.shown()


def test_a_frame_gets_the_room_there_is(pty, screen):
    sizes = []
    screen.show(lambda *size: sizes.append(size) or ["x"])
    assert wait_until(lambda: sizes == [(39, 9)])
    comes(pty, "x")
    pty.resize(20, 8)
    pty.picture = Picture(20, 8)
    pty.picture.feed(b"as the terminal wraps what was there before")
    screen.show(lambda *size: sizes.append(size) or ["y"])
    assert wait_until(lambda: sizes[-1] == (19, 7))
    comes(pty, "y")
    pty.resize(30, 8)
    screen.bell()
    assert wait_until(lambda: sizes[-1] == (29, 7))
    unsized = Pty(0, 0)
    assert terminal_size(unsized.slave) == USUAL_SIZE
    unsized.close()
    with open(os.devnull) as file:
        assert terminal_size(file.fileno()) == USUAL_SIZE


def test_a_frame_that_is_not_replaced_is_marked_and_a_drawing_that_fails_is_shown(pty, screen, monkeypatch):
    monkeypatch.setattr(screen_module, "STALE", 0.5)
    screen.show(frame("POLICY"))
    comes(pty, "POLICY")
    comes(pty, "POLICY", "not updated for 1 s")
    screen.show(frame("HOLD"))
    comes(pty, "HOLD")
    screen.show(lambda columns, rows: [1 / 0])
    assert wait_until(lambda: "cannot be shown: ZeroDivi" in "".join(pty.picture.shown()))
    screen.show(frame("again"))
    comes(pty, "again")


@pytest.mark.parametrize("stopped", [False, True])
def test_a_stuck_terminal_blocks_no_caller_and_shows_the_newest_frame_later(pty, stopped):
    """Its buffer full as its user does not read, or stopped by XOFF."""
    screen = Screen(pty.slave)
    if stopped:
        termios.tcflow(pty.slave, termios.TCOOFF)
        pty.look()
    begin = time.monotonic()
    for i in range(2000):
        screen.show(frame(*[f"{i} " + "x" * 30] * 9))
        screen.line(f"line {i}")
        screen.bell()
        if i % 100 == 0:
            time.sleep(0.001)
    assert time.monotonic() - begin < BLOCKED
    assert wait_until(lambda: screen.line("x" * 1000) or not select.select([], [pty.slave], [], 0)[1])
    begin = time.monotonic()
    for _ in range(100):
        screen.show(frame("older"))
        screen.line("x")
    assert time.monotonic() - begin < BLOCKED
    screen.show(frame("newest"))
    screen.line("last line")
    if stopped:
        termios.tcflow(pty.slave, termios.TCOON)
    else:
        pty.look()
    assert wait_until(lambda: pty.picture.shown()[-2:] == ["last line", "newest"])
    screen.close()


def test_lines_for_a_stuck_terminal_are_bounded_and_counted(pty):
    termios.tcflow(pty.slave, termios.TCOOFF)
    screen = Screen(pty.slave)
    for i in range(LINES + 100):
        screen.line(f"line {i}")
    screen.line("end")
    termios.tcflow(pty.slave, termios.TCOON)
    pty.look()
    assert wait_until(lambda: pty.picture.shown()[-1:] == ["end"])
    every = [*pty.picture.above, *pty.picture.shown()]
    (count,) = [int(line.split()[0]) for line in every if "dropped" in line]
    left = [line for line in every if line.startswith("line ")]
    assert count + len(left) == LINES + 100
    assert len(left) >= LINES - 1
    screen.close()


def test_a_terminal_that_has_gone_is_ignored(pty):
    screen = Screen(pty.slave)
    pty.look()
    screen.show(frame("x"))
    comes(pty, "x")
    pty.hang_up()
    screen.show(frame("y"))
    assert wait_until(lambda: not screen._thread.is_alive())
    for _ in range(10):
        screen.show(frame("z"))
        screen.line("z")
        screen.bell()
    screen.close()


def test_another_programs_non_blocking_mode_is_waited_for(pty):
    os.set_blocking(pty.slave, False)
    screen = Screen(pty.slave)
    screen.line("x" * 30_000)
    threading.Timer(0.2, pty.look).start()
    screen.show(frame("end"))
    assert wait_until(lambda: pty.picture.shown()[-1:] == ["end"])
    assert sum(line.count("x") for line in [*pty.picture.above, *pty.picture.shown()]) == 30_000
    screen.close()

"""The output channel: times and levels, the status line at the bottom of a terminal, and the log file."""

from __future__ import annotations

import argparse
import errno
import io
import logging
import os
import re
import sys
import threading
import time

import pytest
from robot_served import wait as wait_until

from serl_chunk import logs
from serl_chunk.fleet.local import Relay
from serl_chunk.logs import LIVE, Screen, TerminalScreen, add_log_flags, configure, log_to_file, logging_to_stdout
from serl_chunk.runs.status_line import StatusLine
from serl_chunk_robot import output

own = logging.getLogger("serl_chunk.somewhere")
other = logging.getLogger("someone.else")


def flags(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_log_flags(parser)
    return parser.parse_args(arguments)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_has_its_time_and_level_and_nothing_in_it_is_interpreted(capsys):
    with logging_to_stdout():
        own.info("checkpoint 1 written [bold] %s", "x" * 200)
        own.debug("unseen")
        own.warning("careful")
        other.info("unseen too")
        other.warning("theirs")
    out = capsys.readouterr().out.splitlines()
    assert [re.fullmatch(r"\d\d:\d\d:\d\d (.*)", line).group(1) for line in out] == [
        f"INFO    checkpoint 1 written [bold] {'x' * 200}",
        "WARNING careful",
        "WARNING someone.else: theirs",
    ]
    own.info("after the block")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("level", [logging.INFO, logging.DEBUG])
def test_a_record_that_cannot_be_formatted_is_reported_and_raises_nothing(capsys, level):
    record = logging.LogRecord("serl_chunk", level, "", 0, "wrong: %d", ("no number",), None)
    for handler in (logs.ScreenHandler(Screen()), logs.FileHandler())[level < logging.INFO :]:  # no screen looks at it
        handler.handle(record)
    out, err = capsys.readouterr()
    assert out == ""
    assert "wrong: %d" in err


def test_a_log_file_holds_all_levels_earlier_lines_and_tracebacks(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    path = tmp_path / "learner.log"
    path.write_text("of the process before\n")

    def fails() -> None:
        raise ValueError("in a thread")

    with pytest.raises(KeyError), logging_to_stdout():  # noqa: PT012
        own.info("early")
        log_to_file(path)
        log_to_file(tmp_path / "second.log")  # has no effect
        own.debug("a detail")
        other.info("not ours")
        thread = threading.Thread(target=fails)
        thread.start()
        thread.join()
        {}["unexpected"]
    assert os.listdir(tmp_path) == ["learner.log"]
    first, *lines = path.read_text().splitlines()
    assert first == "of the process before"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO    \[\d+\] serl_chunk.somewhere: early", lines[0])
    assert lines[1].endswith(f"DEBUG   [{os.getpid()}] serl_chunk.somewhere: a detail")
    assert "ValueError: in a thread" in lines
    assert lines[-1] == "KeyError: 'unexpected'"
    assert "Traceback" not in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["folder", "full"])
def test_a_log_file_that_cannot_be_written_is_one_warning(tmp_path, capsys, kind):
    path = tmp_path if kind == "folder" else "/dev/full"
    with logging_to_stdout():
        configure(flags("--log_file", str(path)))
        own.info("a line")
        if kind == "full":
            assert logs._file is not None
            assert logs._file._drain(10)
        own.info("another")
    out = capsys.readouterr().out
    assert out.count("WARNING") == 1
    assert f"{path}: the log file cannot be written" in out
    assert out.endswith(" INFO    another\n")


def test_a_log_file_goes_on_once_the_disk_has_room(tmp_path, capsys, monkeypatch):
    path, full, write = tmp_path / "a.log", [True], os.write

    def limited(descriptor: int, data) -> int:
        if full[0] and os.fstat(descriptor).st_ino == path.stat().st_ino:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    monkeypatch.setattr(output.os, "write", limited)
    monkeypatch.setattr(logs, "AGAIN_S", 0.05)
    with logging_to_stdout():
        log_to_file(path)
        for k in range(2):  # a second failure is no second warning
            own.info("lost %d", k)
            wait_until(lambda: logs._file._stream is None)
            time.sleep(0.06)
        full[0] = False
        own.info("there again")
    lines = path.read_text().splitlines()
    assert lines[1] == "WARNING: lines are missing here, as the file could not be written"
    assert lines[2].endswith("there again")
    assert "lost" not in path.read_text()
    assert capsys.readouterr().out.count("It is tried again") == 1


def test_a_terminal_keeps_the_state_below_lines(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    with logging_to_stdout():
        clock = iter(range(0, 1_000, 100))
        with StatusLine(logs.current_screen(), clock=clock.__next__) as status:
            status.update("train", {"step": 1})
            own.info("[red] %s", "x" * 100)
            status.update("train", {"step": 2})
        own.info("after")
    text = terminal.getvalue()
    assert "x" * 100 in text  # whole, for the terminal to wrap
    assert text.index("step 1") < text.index("[red]") < text.index("step 2") < text.index("after")
    assert text.index("[red]") < text.rindex("step 1")  # drawn again below it
    assert "serl_chunk.status" not in text
    assert "\x1b[32mINFO" in text
    assert re.sub(r"\x1b\[[^m]*m", "", text).split("\n")[-2].endswith("INFO    after")
    screen = TerminalScreen()
    screen.state(" ".join(["word"] * 30) + " last")  # more than a row
    screen.line("a line")
    assert "last" in terminal.getvalue().split("a line")[1]


def test_a_process_behind_a_relay_ends_states_in_carriage_returns(monkeypatch, capsys):
    monkeypatch.setenv(LIVE, "1")
    with logging_to_stdout(), logs.status_line() as status:
        status.update("train", {"step": 1})
        own.info("between")
    child = capsys.readouterr().out
    assert re.fullmatch(r"train \| step 1\r[^\r\n]* .*INFO.* between\n\r\n", child)
    reading, writing = os.pipe()
    os.write(writing, child.encode())
    os.close(writing)
    relay = Relay(Screen())
    relay.follow("learner", os.fdopen(reading, "rb"))
    relay.close(10)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(" between")
    assert lines[1:] == ["learner | train | step 1"]

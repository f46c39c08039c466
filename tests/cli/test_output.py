"""What a run prints is written by a thread: a terminal that takes nothing, or is gone, stops and fails no other one."""

from __future__ import annotations

import errno
import io
import os
import pty
import queue
import re
import subprocess
import sys
import threading

import pytest

from serl_chunk.logs import logging_to_stdout
from serl_chunk.runs.status_line import StatusLine
from serl_chunk_robot import output
from serl_chunk_robot.output import background_output

PATIENCE = 60.0  # seconds


@pytest.fixture
def to_descriptor(monkeypatch):
    def point(descriptor: int) -> None:
        for name in ("stdout", "stderr"):
            stream = open(descriptor, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
            monkeypatch.setattr(sys, name, stream)

    return point


def prints(lines: int) -> bool:
    thread = threading.Thread(target=lambda: print_all(lines), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return not thread.is_alive()


def print_all(lines: int) -> None:
    with logging_to_stdout(), StatusLine(clock=iter(range(0, 1_000_000, 100)).__next__) as status:
        for i in range(lines):
            print(f"line {i} " + "x" * 90, flush=True)
            status.update("train", {"step": i})


def test_a_pipe_without_a_reader_stops_no_thread_and_drops_are_counted(to_descriptor, monkeypatch):
    monkeypatch.setattr(output, "FLUSH_SECONDS", 0.2)
    reader, writer = os.pipe()
    to_descriptor(writer)
    with background_output() as thread:
        assert prints(4_000), "a line was waited for"
        found, printed = os.read(reader, 1 << 20), 8_000
        while b"were dropped" not in found:  # it goes on once it is read
            print("once more", flush=True)
            printed += 1
            found += os.read(reader, 1 << 20)
    os.close(writer)
    found += b"".join(iter(lambda: os.read(reader, 1 << 20), b""))
    os.close(reader)
    assert found.startswith(b"line 0 x")
    notes = re.findall(rb"WARNING: (\d+) lines of output were dropped", found)
    assert thread.dropped == sum(map(int, notes)) > 1_000
    assert found.count(b"\n") - len(notes) + thread.dropped == printed  # each line is there or counted


def test_the_end_of_a_run_waits_for_a_terminal_for_a_limited_time(to_descriptor, monkeypatch):
    monkeypatch.setattr(output, "FLUSH_SECONDS", 0.2)
    reader, writer = os.pipe()
    to_descriptor(writer)
    ended: queue.Queue[output.OutputThread] = queue.Queue()

    def run() -> None:
        with background_output() as thread:
            print_all(2_000)
        ended.put(thread)

    threading.Thread(target=run, daemon=True).start()
    thread = ended.get(timeout=PATIENCE)
    os.close(reader)
    assert thread.close(PATIENCE)  # it has found the pipe broken, and lets go of the descriptor
    os.close(writer)


@pytest.mark.parametrize("gone", ["EIO", "EPIPE"])
def test_a_terminal_that_is_gone_raises_nothing(to_descriptor, gone):
    ours, theirs = pty.openpty() if gone == "EIO" else os.pipe()
    to_descriptor(theirs)
    with background_output() as thread:
        print("seen", flush=True)
        assert b"seen" in os.read(ours, 100)
        os.close(ours)
        with pytest.raises(OSError) as raised:  # noqa: PT011 (its number is looked at)
            os.write(theirs, b"x")
        assert errno.errorcode[raised.value.errno] == gone
        print_all(500)
        print("more", file=sys.stderr, flush=True)
    assert thread.dropped == 0  # what cannot be written is not kept
    os.close(theirs)


def test_lines_arrive_whole_in_order_and_before_the_end():
    """In a process of its own, which leaves by an exit in the block, with a library that prints behind it."""
    code = """
import atexit, sys, threading
from serl_chunk_robot.output import background_output
kept = []
atexit.register(lambda: kept[0].write("behind\\n"))
with background_output():
    kept.append(sys.stderr)
    def work(k):
        for i in range(300):
            print(k, end=" ")
            print("line", i, "\\u2713", file=sys.stdout)
    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    print("to the other", file=sys.stderr, flush=True)
    print("unfinished", end="")
    sys.exit(3)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=PATIENCE,
        env=os.environ | {"PYTHONIOENCODING": "ascii"}, check=False,
    )  # fmt: skip
    assert done.returncode == 3
    lines = done.stdout.decode().splitlines()
    for k in range(4):
        own = [line for line in lines if line.startswith(f"{k} ")]
        assert own == [rf"{k} line {i} \u2713" for i in range(300)]
    assert lines[1200:] == ["to the other", "unfinishedbehind"]


@pytest.mark.filterwarnings("ignore:os.fork")
def test_a_forked_process_prints_without_the_thread(to_descriptor):
    """As a driver's: neither the thread nor what holds its lock is there."""
    reader, writer = os.pipe()
    to_descriptor(writer)
    with background_output() as thread, thread._changed:
        child = os.fork()
        if not child:
            print("of the child", flush=True)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert os.read(reader, 100) == b"of the child\n"
    os.close(reader)
    os.close(writer)


def test_streams_in_memory_get_everything_before_the_block_is_left(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    with background_output():
        print_all(100)
        assert not sys.stdout.isatty()
        with pytest.raises(OSError, match="fileno"):
            sys.stdout.fileno()
    assert sys.stdout is stream
    assert stream.getvalue().count("line ") == 100

"""Two processes' lines on one terminal or in one log: whole, named, and with the newest state at the bottom."""

from __future__ import annotations

import io
import os

import pytest

from serl_chunk.cli.log_multiplexer import ERASE_LINE, LIVE, Relay, RelayedStatus, status_line
from serl_chunk.runs.status_line import StatusLine


def relayed(*chunks: bytes, tty: bool = False, width: int = 80) -> str:
    """What comes out of a relay for one process that writes `chunks`, each seen by a read of its own."""
    out = io.StringIO()
    relay = Relay(out, tty, lambda: width)
    for_reading, for_writing = os.pipe()
    pending = iter(chunks)
    read = os.read

    def one_chunk(fd: int, n: int) -> bytes:
        return next(pending, b"") if fd == for_reading else read(fd, n)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("serl_chunk.cli.log_multiplexer.os.read", one_chunk)
        relay.follow("learner", os.fdopen(for_reading, "rb"))
        relay.close(10)
    os.close(for_writing)
    return out.getvalue()


@pytest.mark.parametrize("tty", [False, True])
def test_every_line_has_its_name_wherever_reads_cut_it(tty):
    text = "one\n\ntwo \u2028 \u00e9\nthree".encode()
    whole = relayed(text, tty=tty)
    assert whole.replace(ERASE_LINE, "") == "learner | one\nlearner |\nlearner | two \u2028 \u00e9\nlearner | three\n"
    assert relayed(*(text[i : i + 1] for i in range(len(text))), tty=tty) == whole


def test_bytes_that_are_no_text_do_not_stop_it():
    assert relayed(b"a\xff\nb\n") == "learner | a\ufffd\nlearner | b\n"


@pytest.mark.parametrize("chunks", [(b"1 of 3\r2 of 3\rsaid\n3 of 3\r\n",), (b"1 of 3\r", b"said\n3 of 3\r", b"\n")])
def test_a_log_holds_no_state_but_the_one_that_stays(chunks):
    assert relayed(*chunks) == "learner | said\nlearner | 3 of 3\n"


def test_a_state_stays_by_a_bare_line_end_after_other_lines():
    assert relayed(b"3 of 3\r", b"said\n", b"\r\n") == "learner | said\nlearner | 3 of 3\n"


def test_the_last_state_of_a_process_that_died_stays():
    assert relayed(b"1 of 3\r2 of 3\r") == "learner | 2 of 3\n"


def test_a_terminal_keeps_the_state_below_what_is_said():
    out = relayed(b"1 of 3\rsaid\n2 of 3, and more than fits\r", tty=True, width=20)
    steps = out.split(ERASE_LINE)
    assert steps == [
        "",
        "learner | 1 of 3",
        "learner | said\nlearner | 1 of 3",
        "learner | 2 of 3, a",  # cut: a line that wraps could not be erased
        "learner | 2 of 3, and more than fits\n",
    ]


def test_two_processes_and_the_launcher_share_the_output():
    out = io.StringIO()
    relay = Relay(out, False)
    pipes = [os.pipe() for _ in "ab"]
    for name, (for_reading, _) in zip("ab", pipes, strict=True):
        relay.follow(name, os.fdopen(for_reading, "rb"))
    relay.say("hello")
    for _, for_writing in pipes:
        os.write(for_writing, b"half")  # neither may tear the other's line
    for _, for_writing in pipes:
        os.write(for_writing, b" and half\n")
        os.close(for_writing)
    relay.close(10)
    assert sorted(out.getvalue().splitlines()) == ["a | half and half", "b | half and half", "hello"]


def test_a_closed_output_does_not_stop_the_process():
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    relay = Relay(Closed(), False)
    for_reading, for_writing = os.pipe()
    relay.follow("actor", os.fdopen(for_reading, "rb"))
    for _ in range(64):
        os.write(for_writing, b"x" * 8191 + b"\n")  # far more than a pipe holds
    os.close(for_writing)
    relay.close(10)


def test_a_relayed_status_line_is_states_between_lines(monkeypatch):
    stream = io.StringIO()
    with RelayedStatus(stream) as status:
        status.say("before")
        status.update("train", {"done": 1, "total": 2})
        status.say("between")
    assert stream.getvalue() == "before\ntrain 1/2\rbetween\n\r\n"
    assert relayed(stream.getvalue().encode()) == "learner | before\nlearner | between\nlearner | train 1/2\n"
    stream = io.StringIO()
    with RelayedStatus(stream):
        pass
    assert stream.getvalue() == ""
    assert type(status_line()) is StatusLine
    monkeypatch.setenv(LIVE, "1")
    assert type(status_line()) is RelayedStatus

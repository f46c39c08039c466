"""Two processes' lines on one terminal or in one log: whole, named, and with the newest state at the bottom."""

from __future__ import annotations

import io
import os

import pytest

from serl_chunk.fleet.local import Relay
from serl_chunk.logs import Screen


class LiveScreen(Screen):
    live = True

    def state(self, text: str) -> None:
        self._write(f"<{text}>")


def relayed(*chunks: bytes, live: bool = False) -> str:
    """What comes out of a relay for one process that writes `chunks`, each seen by a read of its own."""
    out = io.StringIO()
    relay = Relay((LiveScreen if live else Screen)())
    for_reading, for_writing = os.pipe()
    pending = iter(chunks)
    read = os.read

    def one_chunk(fd: int, n: int) -> bytes:
        return next(pending, b"") if fd == for_reading else read(fd, n)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("serl_chunk.fleet.local.os.read", one_chunk)
        patch.setattr("sys.stdout", out)
        relay.follow("learner", os.fdopen(for_reading, "rb"))
        relay.close(10)
    os.close(for_writing)
    return out.getvalue()


def test_every_line_has_its_name_wherever_reads_cut_it():
    text = "one\n\ntwo \u2028 \u00e9\nthree".encode()
    whole = relayed(text)
    assert whole == "learner | one\nlearner |\nlearner | two \u2028 \u00e9\nlearner | three\n"
    assert relayed(*(text[i : i + 1] for i in range(len(text)))) == whole


@pytest.mark.parametrize(
    ("chunks", "lines"),
    [
        ((b"a\xff\nb\n",), ["a\ufffd", "b"]),  # bytes that are no text
        ((b"1 of 3\r2 of 3\rsaid\n3 of 3\r\n",), ["said", "3 of 3"]),
        ((b"1 of 3\r", b"said\n3 of 3\r", b"\n"), ["said", "3 of 3"]),
        ((b"3 of 3\r", b"said\n", b"\r\n"), ["said", "3 of 3"]),  # it stays by a bare line end after other lines
        ((b"1 of 3\r2 of 3\r",), ["2 of 3"]),  # the last state of a process that died
    ],
)
def test_a_log_holds_no_state_but_the_one_that_stays(chunks, lines):
    assert relayed(*chunks) == "".join(f"learner | {line}\n" for line in lines)


def test_a_screen_gets_the_newest_state_of_any_process_until_it_stays():
    assert relayed(b"1 of 3\rsaid\n2 of 3\r\n", live=True) == (
        "<learner | 1 of 3>learner | said\n<learner | 2 of 3><>learner | 2 of 3\n"
    )
    assert relayed(b"1 of 3\r2", live=True) == "<learner | 1 of 3>learner | 2\n"


def test_two_processes_share_the_output(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    relay = Relay(Screen())
    pipes = [os.pipe() for _ in "ab"]
    for name, (for_reading, _) in zip("ab", pipes, strict=True):
        relay.follow(name, os.fdopen(for_reading, "rb"))
    for _, for_writing in pipes:
        os.write(for_writing, b"half")  # neither may tear the other's line
    for _, for_writing in pipes:
        os.write(for_writing, b" and half\n")
        os.close(for_writing)
    relay.close(10)
    assert sorted(out.getvalue().splitlines()) == ["a | half and half", "b | half and half"]

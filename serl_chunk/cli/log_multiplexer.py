"""What two processes print, on one terminal or in one log: whole lines, each behind the name of who printed it.

A line that ends in a line feed stays. One that ends in a carriage return is a state: the newest is kept at the bottom
of a terminal until another follows, and a carriage return before a line feed makes it stay.
"""

from __future__ import annotations

import codecs
import os
import re
import shutil
import threading
from collections.abc import Callable
from typing import IO, TextIO

from serl_chunk.runs.status_line import TTY_PERIOD, StatusLine

LIVE = "SERL_CHUNK_LIVE_STATUS"  # set for a process whose output a Relay shows on a terminal
READ_BYTES = 1 << 16
ERASE_LINE = "\r\x1b[2K"
PIECES = re.compile(r"([^\r\n]*)(\r\n|\r|\n|$)")  # of a read: text, and what ended it


def status_line() -> StatusLine:
    """The status line that suits its output: a Relay on a terminal, or this process's standard error."""
    return RelayedStatus() if os.environ.get(LIVE) else StatusLine()


class RelayedStatus(StatusLine):
    """A status line for a Relay on a terminal: each state ends in a carriage return, what is said in a line feed."""

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__(stream, tty=False)
        self._period = TTY_PERIOD
        self._end = "\n"

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if self._shown_at is not None:
            self._stream.write("\r\n")  # the last state stays
            self._stream.flush()

    def _show(self) -> None:
        self._end = "\r"
        try:
            super()._show()
        finally:
            self._end = "\n"

    def _print(self, line: str) -> None:
        self._stream.write(line + self._end)
        self._stream.flush()


class Relay:
    """Copies what several processes print to `out`, line by line, as `NAME | LINE`.

    In a log, states that do not stay are left out. Where `out` is closed the rest is read and dropped: a run goes on
    without its spectators, and a full pipe would stop it.

    Args:
        out: where to write.
        tty: whether `out` is a terminal; asked of it by default.
        width: columns of the terminal, to which a state is cut.
    """

    def __init__(
        self,
        out: TextIO,
        tty: bool | None = None,
        width: Callable[[], int] = lambda: shutil.get_terminal_size().columns,
    ) -> None:
        self.tty = out.isatty() if tty is None else tty
        self._out = out
        self._width = width
        self._lock = threading.Lock()
        self._states: dict[str, str] = {}  # name -> its state; the last one is drawn
        self._threads: list[threading.Thread] = []
        self._gone = False  # whether `out` takes no more

    def follow(self, name: str, pipe: IO[bytes]) -> None:
        """Copy `pipe`, in a thread, until it ends; closes it."""
        thread = threading.Thread(target=self._copy, args=(name, pipe), name=f"relay-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def say(self, text: str) -> None:
        """Print a line of the caller's own."""
        with self._lock:
            self._write(text)

    def close(self, timeout: float) -> None:
        """Wait until every pipe has ended, at most `timeout` seconds for each: a grandchild may hold one open."""
        for thread in self._threads:
            thread.join(timeout)

    def _copy(self, name: str, pipe: IO[bytes]) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        text, returned = "", False  # the line so far, and whether a carriage return was the last character
        with pipe:
            while data := os.read(pipe.fileno(), READ_BYTES):
                for part, ending in PIECES.findall(decoder.decode(data)):
                    text += part
                    with self._lock:
                        if "\r" in ending:
                            self._state(name, text)
                        if "\n" in ending:
                            stays = "\r" in ending or (returned and not text)  # a read may cut "\r\n" in two
                            self._line(name, self._states.pop(name, "") if stays else text)
                    if ending:
                        text, returned = "", ending == "\r"
        with self._lock:
            last = text or self._states.pop(name, "")
            if last:
                self._line(name, last)

    def _state(self, name: str, text: str) -> None:
        if not text:
            return  # a bare carriage return before a line feed: the state it refers to is there
        self._states.pop(name, None)
        self._states[name] = text
        if self.tty:
            self._put(ERASE_LINE + self._drawn())

    def _line(self, name: str, text: str) -> None:
        self._write(f"{name} | {text}".rstrip())

    def _write(self, line: str) -> None:
        self._put(f"{ERASE_LINE}{line}\n{self._drawn()}" if self.tty else line + "\n")

    def _drawn(self) -> str:
        if not self._states:
            return ""
        name, text = list(self._states.items())[-1]
        return f"{name} | {text}"[: self._width() - 1]  # a full last column would wrap

    def _put(self, text: str) -> None:
        if self._gone:
            return
        try:
            self._out.write(text)
            self._out.flush()
        except (OSError, ValueError):  # the terminal is closed, the pipe has no reader, or the disk of the log is full
            self._gone = True

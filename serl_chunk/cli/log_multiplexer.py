"""The output of two processes on one terminal or in one log: whole lines, each behind the name of its process.

A line that ends in a line feed stays. One that ends in a carriage return is a state: the newest is kept at the bottom
of a terminal until another follows, and a carriage return before a line feed makes it stay.
"""

from __future__ import annotations

import codecs
import os
import re
import threading
from typing import IO

from serl_chunk.cli.logs import Screen

READ_BYTES = 1 << 16
PIECES = re.compile(r"([^\r\n]*)(\r\n|\r|\n|$)")  # of a read: text, and what ended it


class Relay:
    """Copies the output of several processes to a screen, line by line, as `NAME | LINE`."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._lock = threading.Lock()
        self._states: dict[str, str] = {}  # name -> its state; the last one is shown
        self._threads: list[threading.Thread] = []

    @property
    def live(self) -> bool:
        """Whether the processes shall print states."""
        return self._screen.live

    def follow(self, name: str, pipe: IO[bytes]) -> None:
        """Copy `pipe`, in a thread, until it ends; closes it."""
        thread = threading.Thread(target=self._copy, args=(name, pipe), name=f"relay-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

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
                        if "\r" in ending and text:
                            self._states.pop(name, None)
                            self._states[name] = text
                            self._show_state()
                        if "\n" in ending:
                            stays = "\r" in ending or (returned and not text)  # a read may cut "\r\n" in two
                            self._line(name, self._end_state(name) if stays else text)
                    if ending:
                        text, returned = "", ending == "\r"
        with self._lock:
            if last := text or self._end_state(name):
                self._line(name, last)

    def _line(self, name: str, text: str) -> None:
        self._screen.line(f"{name} | {text}".rstrip())

    def _end_state(self, name: str) -> str:
        if text := self._states.pop(name, ""):
            self._show_state()
        return text

    def _show_state(self) -> None:
        name, text = next(reversed(self._states.items()), ("", ""))
        self._screen.state(f"{name} | {text}" if text else "")

"""Pseudo terminals: what a program wrote to one, as it would stand on the screen."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import struct
import termios
import threading
import time
from collections.abc import Callable

_TOKEN = re.compile(rb"\x1b\[([?0-9;]*)([A-Za-z])|(\r)|(\n)|(\x07)|([^\x1b\r\n\x07]+)")


class Picture:
    """The least of a terminal: text, line ends, moves up, erasing, and modes; it scrolls and wraps."""

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self.lines = [""] * rows
        self.above: list[str] = []  # scrolled out
        self.row = self.column = self.bells = 0
        self.modes: set[str] = set()
        self.written = ""  # all text, without its line ends

    def feed(self, data: bytes) -> None:
        position = 0
        while position < len(data):
            token = _TOKEN.match(data, position)
            assert token, data[position : position + 20]
            position = token.end()
            parameters, final, carriage, newline, bell, text = token.groups()
            if carriage:
                self.column = 0
            elif newline:
                self._down()
            elif bell:
                self.bells += 1
            elif text:
                self.written += text.decode()
                for letter in text.decode():
                    self._put(letter)
            else:
                self._control(parameters.decode(), final.decode())

    def shown(self) -> list[str]:
        lines = [line.rstrip() for line in self.lines]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    def _put(self, letter: str) -> None:
        if self.column == self.columns:
            self.column = 0
            self._down()
        line = self.lines[self.row].ljust(self.columns)
        self.lines[self.row] = line[: self.column] + letter + line[self.column + 1 :]
        self.column += 1

    def _down(self) -> None:
        if self.row + 1 < self.rows:
            self.row += 1
        else:
            self.above.append(self.lines.pop(0).rstrip())
            self.lines.append("")

    def _control(self, parameters: str, final: str) -> None:
        if final == "A":
            self.row = max(0, self.row - int(parameters or 1))
        elif final == "H":
            self.row = self.column = 0
        elif final == "K":
            self.lines[self.row] = self.lines[self.row].ljust(self.columns)[: self.column]
        elif final == "J":
            self.lines[self.row] = self.lines[self.row].ljust(self.columns)[: self.column]
            first = 0 if parameters == "2" else self.row + 1
            self.lines[first:] = [""] * (self.rows - first)
        elif final in "hl":
            (self.modes.add if final == "h" else self.modes.discard)(parameters)
        else:
            assert final == "m", (parameters, final)


class Pty:
    """A pseudo terminal of this process: `slave` is the program's side, `type` and `wait_until` the user's."""

    def __init__(self, columns: int = 80, rows: int = 24) -> None:
        self.master, self.slave = os.openpty()
        self.resize(columns, rows)
        self.picture = Picture(columns, rows)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def attributes(self) -> list:
        return termios.tcgetattr(self.slave)

    def type(self, data: bytes) -> None:
        os.write(self.master, data)

    def look(self) -> None:
        """Read what the program writes from now on, on a thread; before that its side fills up and blocks."""
        self._stop.clear()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def look_away(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def hang_up(self) -> None:
        self.look_away()
        os.close(self.master)
        self.master = -1

    def close(self) -> None:
        if self.master >= 0:
            self.hang_up()
        with contextlib.suppress(OSError):
            os.close(self.slave)

    def _read(self) -> None:
        while not self._stop.is_set():
            if select.select([self.master], [], [], 0.02)[0]:
                try:
                    self.picture.feed(self._whole(os.read(self.master, 1 << 16)))
                except OSError:
                    return

    _rest = b""

    def _whole(self, data: bytes) -> bytes:
        """What may be fed: no sequence or character that is cut at the end of a read."""
        data = self._rest + data
        cut = data.rfind(b"\x1b")
        if cut >= 0 and not re.match(rb"\x1b\[[?0-9;]*[A-Za-z]", data[cut:]):
            self._rest = data[cut:]
            return data[:cut]
        end = len(data)
        while end and data[end - 1] >= 0x80:  # a character in UTF-8; what follows it comes with the next read
            end -= 1
        self._rest = data[end:]
        return data[:end]


def wait_until(condition: Callable[[], object], seconds: float = 20.0) -> bool:
    """Whether `condition` came true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True

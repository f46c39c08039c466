"""Writes the operator's view at the bottom of a terminal, on a thread: a stuck terminal blocks no caller."""

from __future__ import annotations

import collections
import os
import select
import threading
import time
from collections.abc import Callable

PERIOD = 0.1  # seconds between two frames at least
LINES = 500  # that wait for a stuck terminal; older ones are dropped
STALE = 2.0  # seconds without `show` after which the frame is marked: its state may be over
CLOSING = 0.3  # seconds for the last frame and lines
USUAL_SIZE = (80, 24)  # of a terminal that does not know its own

_BEGIN = "\x1b[?25l\x1b[?2004h"  # no cursor; pastes are marked as such
_END = "\r\n\x1b[?2004l\x1b[?25h"

Draw = Callable[[int, int], list[str]]
"""Returns the lines of a frame for a number of columns and rows, none wider and no more than these."""


class Screen:
    """Lines that scroll, and the newest frame below them.

    No method waits for the terminal. Frames that come faster than the terminal takes them, or than `PERIOD`, are never
    drawn; the drawing itself also happens on the thread. The descriptor stays open.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._changed = threading.Condition()  # reentrant: a signal's handler may close it
        self._lines: collections.deque[str] = collections.deque()
        self._dropped = 0
        self._draw: Draw | None = None
        self._content: object = None
        self.content: object = None  # of the frame that stands on the screen
        self._bell = self._closing = False
        self._frame: list[str] = []  # of the newest `show`, at `_drawn_at`
        self._drawn_at = 0.0
        self._shown: list[str] = []  # what stands on the screen
        self._size = terminal_size(descriptor)
        self._thread = threading.Thread(target=self._run, name="console-screen", daemon=True)
        self._thread.start()

    def show(self, draw: Draw, content: object = None) -> None:
        """Replace the frame. `content`: what it shows, for those that have to know what stands on the screen."""
        with self._changed:
            self._draw, self._content = draw, content
            self._changed.notify_all()

    def line(self, text: str) -> None:
        with self._changed:
            self._lines.extend(text.split("\n"))
            while len(self._lines) > LINES:
                self._lines.popleft()
                self._dropped += 1
            self._changed.notify_all()

    def bell(self) -> None:
        with self._changed:
            self._bell = True
            self._changed.notify_all()

    def close(self) -> None:
        """Write what is left, for `CLOSING` seconds at most, and leave the terminal usable."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSING)

    def _run(self) -> None:
        newest: Draw | None = None
        try:
            self._deliver(_BEGIN)
            while True:
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._draw or self._lines or self._bell or self._closing,
                        STALE / 2 if self._frame else None,
                    )
                    closing, draw, lines = self._closing, self._draw, list(self._lines)
                    bell, dropped, content = self._bell, self._dropped, self._content
                    self._draw, self._bell, self._dropped = None, False, 0
                    self._lines.clear()
                if dropped:
                    lines.insert(0, f"{dropped} lines were dropped: the terminal accepted nothing")
                size = terminal_size(self._descriptor)
                if draw is not None:
                    newest, self._drawn_at = draw, time.monotonic()
                if newest is not None and (draw is not None or size != self._size):
                    self._frame = _drawn(newest, size)
                age = time.monotonic() - self._drawn_at
                mark = [f"not updated for {age:.0f} s"[: size[0] - 1]] if self._frame and age > STALE else []
                self._deliver(self._update([*self._frame, *mark], lines, size) + "\a" * bell + _END * closing)
                self.content = content if draw is not None else self.content
                if closing:
                    return
                with self._changed:
                    self._changed.wait_for(lambda: self._closing, PERIOD)
        except OSError:  # EIO of a closed terminal, a descriptor that was closed: nothing is written any more
            pass

    def _update(self, frame: list[str], lines: list[str], size: tuple[int, int]) -> str:
        """Return what turns the screen into `frame`, with `lines` above it."""
        if not lines and frame == self._shown and size == self._size:
            return ""
        if size != self._size:
            text = "\x1b[H\x1b[2J"  # the terminal has wrapped the old frame in its own way
        else:
            text = "\r" + (f"\x1b[{len(self._shown) - 1}A" if len(self._shown) > 1 else "")
        if lines:
            text += "\x1b[J" + "".join(f"{line}\r\n" for line in lines)
        self._shown, self._size = frame, size
        return text + "\r\n".join(f"{line}\x1b[K" for line in frame) + "\x1b[J"

    def _deliver(self, text: str) -> None:
        data = memoryview(text.encode("utf-8", "backslashreplace"))
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:  # another program made the terminal non-blocking
                select.select([], [self._descriptor], [], 1.0)
                time.sleep(0.001)


def _drawn(draw: Draw, size: tuple[int, int]) -> list[str]:
    try:
        # The last column is left free, for a terminal would wrap there, and the first row for a line above.
        return draw(size[0] - 1, size[1] - 1)
    except Exception as error:  # an old frame would show a state that is over
        return [f"the state cannot be shown: {error!r}"[: size[0] - 1]]


def terminal_size(descriptor: int) -> tuple[int, int]:
    """Return (columns, rows) of a terminal."""
    try:
        size = os.get_terminal_size(descriptor)
    except OSError:
        return USUAL_SIZE
    return (size.columns or USUAL_SIZE[0], size.lines or USUAL_SIZE[1])

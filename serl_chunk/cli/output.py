"""Standard output and error of a run, written by a thread of their own.

A terminal may take nothing for hours (Ctrl-S, a pager, a stopped `tee`) or be gone (a closed window, a lost ssh
connection). Neither may stop or fail the thread that commands a robot, wherever in it a line is printed.
"""

from __future__ import annotations

import collections
import contextlib
import io
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO

QUEUE_CHARS = 1 << 18  # what waits for a terminal at most: minutes of a live status line, days of a log
FLUSH_SECONDS = 5.0  # at the end of a run; a terminal that takes nothing until then gets no more


class BackgroundStream(io.TextIOBase):
    """A text stream that only queues what is written, and neither blocks nor raises, whatever `stream` does.

    A line is queued when it is complete or flushed, so that lines of several threads stay whole.
    """

    def __init__(
        self, stream: TextIO, queue: OutputThread, on_error: Callable[[Exception], None] | None = None
    ) -> None:
        super().__init__()
        self._stream, self._queue, self._on_error = stream, queue, on_error
        try:
            self._descriptor: int | None = stream.fileno()
        except (OSError, ValueError, AttributeError):  # of a test, in memory
            self._descriptor = None
        self._partial: dict[int, str] = {}  # thread -> what it has written of a line
        self._gone = False  # whether `stream` takes no more

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """That of the stream."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        """Queue `text`, or keep it until the line is complete."""
        line = self._partial.pop(threading.get_ident(), "") + text
        if line.endswith("\n") or len(line) > QUEUE_CHARS:
            self._queue.put(self, line)
        elif line:
            self._partial[threading.get_ident()] = line
        return len(text)

    def flush(self) -> None:
        """Queue what this thread has written of a line; waits for nothing."""
        if line := self._partial.pop(threading.get_ident(), ""):
            self._queue.put(self, line)

    def flush_all(self) -> None:
        """Queue what any thread has written of a line."""
        for thread in list(self._partial):
            if line := self._partial.pop(thread, ""):
                self._queue.put(self, line)

    def writable(self) -> bool:
        """True."""
        return True

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """The stream's descriptor. Raises OSError where it has none."""
        if self._descriptor is None:
            raise io.UnsupportedOperation("fileno")
        return self._descriptor

    def deliver(self, text: str) -> None:
        """Write `text` at last, however long that takes; by the queue's thread."""
        if self._gone:
            return
        try:
            if self._descriptor is None:
                self._stream.write(text)
                self._stream.flush()
                return
            # Not by the stream: a thread that waits within it holds a lock that the interpreter wants at its end.
            data = memoryview(text.encode(self.encoding, "backslashreplace"))
            while data:
                try:
                    data = data[os.write(self._descriptor, data) :]
                except BlockingIOError:  # another program made the terminal so
                    select.select([], [self._descriptor], [], 1.0)
        except (OSError, ValueError) as error:  # EIO, EPIPE, a full disk; a stream that was closed
            self._gone = True
            if self._on_error is not None:
                self._on_error(error)


class OutputThread:
    """A bounded queue of text and the thread that writes it; lines that find it full are counted and dropped."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # its lock may be taken again by a signal's handler
        self._pieces: collections.deque[tuple[BackgroundStream, str]] = collections.deque()
        self._chars = 0
        self._writing = False
        self._ended = False
        self.dropped = 0  # lines so far
        self._not_noted = 0  # of them, those that no line of the output counts yet
        threading.Thread(target=self._run, name="output", daemon=True).start()

    def put(self, stream: BackgroundStream, text: str) -> None:
        """Queue `text` for `stream`, or drop it."""
        with self._changed:
            if not self._ended:
                if self._chars + len(text) > QUEUE_CHARS:
                    lines = text.count("\n")
                    self.dropped, self._not_noted = self.dropped + lines, self._not_noted + lines
                    return
                self._note(stream)
                self._append(stream, text)
                self._changed.notify_all()
                return
            written = not self._pieces and not self._writing
        if written:  # what a library prints at the interpreter's end
            stream.deliver(text)

    def close(self, timeout: float) -> bool:
        """Take no more and wait until all is written, `timeout` seconds at most; returns whether it is."""
        deadline = time.monotonic() + timeout
        with self._changed:
            self._ended = True
            if self._pieces:
                self._note(self._pieces[-1][0])
            self._changed.notify_all()
            while self._pieces or self._writing:
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    return False
        return True

    def _note(self, stream: BackgroundStream) -> None:
        if self._not_noted:
            self._append(stream, f"WARNING: {self._not_noted} lines of output were dropped: nothing took them\n")
            self._not_noted = 0

    def _append(self, stream: BackgroundStream, text: str) -> None:
        self._pieces.append((stream, text))
        self._chars += len(text)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._pieces or self._ended)
                if not self._pieces:
                    return
                stream, text = self._pieces.popleft()
                self._chars -= len(text)
                self._writing = True
            stream.deliver(text)


@contextlib.contextmanager
def background_output() -> Iterator[OutputThread]:
    """Let `sys.stdout` and `sys.stderr` be such streams within the block; what is queued is written at its end."""
    before = sys.stdout, sys.stderr
    with contextlib.suppress(OSError, ValueError):  # a terminal that is gone already
        for stream in before:
            stream.flush()
    thread = OutputThread()
    streams = [BackgroundStream(stream, thread) for stream in before]
    sys.stdout, sys.stderr = streams
    try:
        yield thread
    finally:
        sys.stdout, sys.stderr = before
        for own in streams:
            own.flush_all()
        thread.close(FLUSH_SECONDS)

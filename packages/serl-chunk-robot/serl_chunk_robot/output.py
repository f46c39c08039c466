"""Standard output and error, written by a thread: a terminal or pipe that takes nothing must not stop a robot's loop.

Code below Python (XLA, a vendor's library) writes to the descriptors itself: in `background_output` these do not block.
"""

from __future__ import annotations

import collections
import contextlib
import io
import os
import select
import stat
import sys
import threading
import time
from typing import Callable, Deque, Dict, Iterator, Optional, TextIO, Tuple

QUEUE_CHARS = 1 << 18  # queued for a terminal at most: minutes of a live status line, days of a log
FLUSH_SECONDS = 5.0  # at the end of a run, for what is queued


class BackgroundStream(io.TextIOBase):
    """A text stream that queues complete or flushed lines, and neither blocks nor raises, whatever `stream` does.

    When `stream` fails, the queue's thread calls `on_error` once, and nothing more is written to it.
    """

    def __init__(
        self, stream: TextIO, queue: OutputThread, on_error: Optional[Callable[[Exception], None]] = None
    ) -> None:
        super().__init__()
        self._stream, self._queue, self._on_error = stream, queue, on_error
        try:
            self.descriptor: Optional[int] = stream.fileno()
        except (OSError, ValueError, AttributeError):  # a stream in memory, of a test
            self.descriptor = None
        self._partial: Dict[int, str] = {}  # thread -> the part of a line that it wrote
        self._failed = False

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        line = self._partial.pop(threading.get_ident(), "") + text
        if line.endswith("\n") or len(line) > QUEUE_CHARS:
            self._queue.put(self, line)
        elif line:
            self._partial[threading.get_ident()] = line
        return len(text)

    def flush(self) -> None:
        if line := self._partial.pop(threading.get_ident(), ""):
            self._queue.put(self, line)

    def flush_all(self) -> None:
        for thread in list(self._partial):
            if line := self._partial.pop(thread, ""):
                self._queue.put(self, line)

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        if self.descriptor is None:
            raise io.UnsupportedOperation("fileno")
        return self.descriptor

    def deliver(self, text: str) -> None:
        if self._failed:
            return
        try:
            if self.descriptor is None:
                self._stream.write(text)
                self._stream.flush()
                return
            # Not by the stream: a thread that waits in it holds a lock that the interpreter needs at its end.
            data = memoryview(text.encode(self.encoding, "backslashreplace"))
            while data:
                try:
                    data = data[os.write(self.descriptor, data) :]
                except BlockingIOError:  # see `unblocked`
                    select.select([], [self.descriptor], [], 1.0)
        except (OSError, ValueError) as error:  # EIO, EPIPE, a full disk; a stream that was closed
            self._failed = True
            if self._on_error is not None:
                self._on_error(error)


class OutputThread:
    """A bounded queue of text and the thread that writes it; lines that do not fit are counted and dropped."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # reentrant: a signal's handler may take its lock again
        self._pieces: Deque[Tuple[BackgroundStream, str]] = collections.deque()
        self._chars = 0
        self._writing = False
        self._ended = False
        self._process = os.getpid()
        self.dropped = self._noted = 0  # lines so far, and those of them that the output mentions
        threading.Thread(target=self._run, name="output", daemon=True).start()

    def put(self, stream: BackgroundStream, text: str) -> None:
        if os.getpid() != self._process:  # forked, as a driver's process: the thread is not there, its lock may be held
            stream.deliver(text)
            return
        with self._changed:
            if not self._ended:
                if self._chars + len(text) > QUEUE_CHARS:
                    self.dropped += text.count("\n")
                else:
                    self._note(stream)
                    self._append(stream, text)
                    self._changed.notify_all()
                return
            written = not self._pieces and not self._writing
        if written:  # printed by a library at the interpreter's end
            stream.deliver(text)

    def close(self, timeout: float) -> bool:
        """Accept no more and wait, `timeout` seconds at most; returns whether everything is written."""
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
        if lines := self.dropped - self._noted:
            self._append(stream, f"WARNING: {lines} lines of output were dropped: the output accepted nothing\n")
            self._noted = self.dropped

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


class _Unblocked:
    """A descriptor of a pipe or terminal with an open file of its own that does not block, until `restore`.

    What does not fit is lost then, and its writer gets EAGAIN. The flag is not set on the open file that was there: a
    shell or another program shares it. Where it cannot be opened again, as a socket, the descriptor stays as it is.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._before = descriptor, -1
        try:
            if not (stat.S_ISFIFO(os.fstat(descriptor).st_mode) or os.isatty(descriptor)):
                return
            own = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError:  # a pipe without a reader, a terminal of another user, a system without /proc
            return
        self._before = os.dup(descriptor)
        os.dup2(own, descriptor)
        os.close(own)

    def restore(self) -> None:
        if self._before >= 0:
            os.dup2(self._before, self._descriptor)
            os.close(self._before)
            self._before = -1


@contextlib.contextmanager
def background_output() -> Iterator[OutputThread]:
    """Replace `sys.stdout` and `sys.stderr` by background streams in the block; its end writes what is queued.

    Their descriptors do not block meanwhile. Where the end could not write all, they do not block after it either: an
    error that ends the interpreter must not wait for a reader that is gone.
    """
    before = sys.stdout, sys.stderr
    with contextlib.suppress(OSError, ValueError):  # a terminal that is closed already
        for stream in before:
            stream.flush()
    thread = OutputThread()
    streams = [BackgroundStream(stream, thread) for stream in before]
    unblocked = [_Unblocked(each) for each in {s.descriptor for s in streams if s.descriptor is not None}]
    sys.stdout, sys.stderr = streams  # type: ignore[assignment]
    try:
        yield thread
    finally:
        sys.stdout, sys.stderr = before
        for own in streams:
            own.flush_all()
        if thread.close(FLUSH_SECONDS):
            for each in unblocked:
                each.restore()

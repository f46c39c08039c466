"""Reads keys from a terminal in raw mode, on a thread, and gives the terminal back as it was on every way out."""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import termios
import threading
import time
from collections.abc import Collection
from typing import Any, NamedTuple

from serl_chunk.console.keys import Decoder
from serl_chunk.console.screen import CLOSING, Screen

CLOSED = "terminal_closed"  # in place of a key, once, when the terminal has gone
_ENDING = (signal.SIGTERM, signal.SIGHUP)
_READ = 4096  # bytes
_PAUSE = 0.01  # seconds
_INPUT, _LOCAL, _CHARACTERS = 0, 3, 6  # in the list of termios
_READS = 64  # of typed-ahead input at most, 256 KiB
_FAILURES = (OSError, termios.error)  # of a terminal that has gone; the second is no OSError


class Key(NamedTuple):
    """A key, by the name that the decoder gives it, at monotonic seconds `stamp`; or CLOSED."""

    name: str
    stamp: float
    content: object = None  # what stood on the screen then (`Screen.show`)


def is_usable(source: int, target: int) -> bool:
    """Return whether keys can be read from `source` and frames shown on `target`.

    Both must be terminals that know escape sequences, and the process in the foreground: one in the background would be
    stopped by its first look at the keys.
    """
    if not (os.isatty(source) and os.isatty(target)) or os.environ.get("TERM", "dumb") == "dumb":
        return False
    try:
        return os.tcgetpgrp(source) == os.getpgrp()
    except OSError:  # not the terminal that controls this process, which therefore has no background
        return True


class Terminal:
    """A terminal in raw mode: no echo, and no key that stops output or sends a signal. Use it as a context.

    The terminal is restored by `close`, at the interpreter's end, and by SIGTERM and SIGHUP where nothing handles them.
    A process that ends without unwinding, as by `os._exit`, must call `close` itself. It may be called from any thread.

    The descriptors are those of `is_usable`, and stay open. Raises OSError: the terminal has gone.
    """

    def __init__(self, source: int = 0, target: int = 1) -> None:
        self._source = source
        self._lock = threading.RLock()  # of the decoder and the keys; reentrant for a signal's handler
        self._decoder = Decoder()
        self._keys: list[Key] = []
        self._closing = False
        self._process = os.getpid()
        self._handlers: dict[int, Any] = {}
        try:
            self._before = termios.tcgetattr(source)
            self._set(_raw(self._before))
        except termios.error as error:
            raise OSError(*error.args) from error
        self._woken, self._wake = os.pipe()
        atexit.register(self.close)
        self._handle_signals()
        self.screen = Screen(target)
        self._thread = threading.Thread(target=self._run, name="console-keys", daemon=True)
        self._thread.start()

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self) -> list[Key]:
        with self._lock:
            keys, self._keys = self._keys, []
        return keys

    def empty(self, keep: Collection[str] = ()) -> None:
        """Drop all keys typed so far but those named in `keep`: a stop that was typed must stop.

        Esc is kept with its time: whether it is a key shows after this call.
        """
        with self._lock:
            for _ in range(_READS):
                if not self._take(time.monotonic()):
                    break
            self._keys = [key for key in self._keys if key.name in keep or key.name == CLOSED]

    def close(self) -> None:
        """Restore the terminal, and drop what was typed, so that no shell runs it. A second call does nothing."""
        with self._lock:
            if self._closing or os.getpid() != self._process:  # a fork inherits handlers, and has no thread
                return
            self._closing = True
        self.screen.close()
        with contextlib.suppress(*_FAILURES):
            self._set(self._before)
        os.write(self._wake, b"\0")
        self._thread.join(CLOSING)
        if not self._thread.is_alive():
            os.close(self._woken)
            os.close(self._wake)
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._end:
                with contextlib.suppress(ValueError):  # not in the main thread
                    signal.signal(number, handler)
        atexit.unregister(self.close)

    def _set(self, attributes: list[Any]) -> None:
        # Not TCSAFLUSH, which waits for output: a stuck terminal would keep this thread.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})  # else a background process is stopped
        try:
            termios.tcsetattr(self._source, termios.TCSANOW, attributes)
            termios.tcflush(self._source, termios.TCIFLUSH)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def _handle_signals(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _ENDING:
            if signal.getsignal(number) == signal.SIG_DFL:
                self._handlers[number] = signal.signal(number, self._end)

    def _end(self, number: int, frame: object) -> None:
        """End the process by the signal, as if it were not handled, after the terminal is restored."""
        self.close()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._source, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        while True:
            with self._lock:
                wait = self._decoder.wait(time.monotonic())
            events = dict(poll.poll(None if wait is None else wait * 1000))
            with self._lock:
                if self._closing:
                    return
                now = time.monotonic()
                data = self._take(now)
                if data is None or events.get(self._source, 0) & (select.POLLHUP | select.POLLERR | select.POLLNVAL):
                    self._keys.append(Key(CLOSED, now))
                    return
            if events and not data:  # taken by `empty`, or a terminal that reports input and has none
                time.sleep(_PAUSE)

    def _take(self, now: float) -> bytes | None:
        """Decode what there is, and return it; None where the terminal has gone. Never waits, as VMIN is 0."""
        try:
            data = os.read(self._source, _READ)
        except BlockingIOError:
            data = b""
        except OSError:
            return None
        self._keys += [Key(name, now, self.screen.content) for name in self._decoder.feed(data, now)]
        return data


def _raw(attributes: list[Any]) -> list[Any]:
    """Return the attributes without echo, lines, signals, flow control and translation of input."""
    raw = list(attributes)
    raw[_INPUT] &= ~(termios.BRKINT | termios.ICRNL | termios.INLCR | termios.IGNCR | termios.ISTRIP | termios.IXON)
    raw[_LOCAL] &= ~(termios.ECHO | termios.ECHONL | termios.ICANON | termios.IEXTEN | termios.ISIG)
    raw[_CHARACTERS] = list(attributes[_CHARACTERS])
    raw[_CHARACTERS][termios.VMIN], raw[_CHARACTERS][termios.VTIME] = 0, 0
    return raw

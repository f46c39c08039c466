"""The one output channel: `logging` on standard output with the status line below it, and a log file."""

from __future__ import annotations

import argparse
import collections
import contextlib
import logging
import math
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from serl_chunk.io import os_reason
from serl_chunk.runs.status_line import STATUS_LOGGER, StatusLine
from serl_chunk.signals import TELLING, before_exit
from serl_chunk_robot.output import FLUSH_SECONDS, BackgroundStream, OutputThread

if TYPE_CHECKING:
    from rich.live import Live

LIVE = "SERL_CHUNK_LIVE_STATUS"  # set for a process whose output a Relay shows on a terminal
PACKAGE = "serl_chunk"
LEVELS = ("debug", "info", "warning", "error")
EARLY_LINES = 1000  # of a log file, kept until its folder is known
AGAIN_S = 10.0  # until a log file that could not be written is tried again
COLOURS = {logging.DEBUG: "2", logging.INFO: "32", logging.WARNING: "33", logging.ERROR: "31"}  # ANSI

logger = logging.getLogger(__name__)


class Screen:
    """Lines on a standard output that is no terminal, which has no room for a state."""

    live = False  # whether it shows states

    def line(self, text: str) -> None:
        """Print `text`, which may have several lines."""
        self._write(text + "\n")

    def state(self, text: str) -> None:
        """Show `text` below the lines, in place of the state before it; nothing where it is empty."""

    def keep(self) -> None:
        """Turn the newest state into a line."""

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


class RelayedScreen(Screen):
    """The output of a process that a Relay shows on a terminal: a state ends in a carriage return."""

    live = True
    _shown = False

    def state(self, text: str) -> None:
        self._shown = True
        self._write(text + "\r")

    def keep(self) -> None:
        if self._shown:
            self._write("\r\n")
        self._shown = False


class TerminalScreen(Screen):
    """A terminal, with the state at its bottom. Lines may hold ANSI colours; nothing else in them is interpreted."""

    live = True

    def __init__(self) -> None:
        from rich.console import Console

        self._lock = threading.RLock()
        self._console = Console(file=sys.stdout, force_terminal=True)
        self._live: Live | None = None
        self._text = ""

    def line(self, text: str) -> None:
        from rich.console import Group
        from rich.text import Text

        # Whole lines, for the terminal to wrap: what is to be copied must not be cut in two.
        whole = Group(Text.from_ansi(text, no_wrap=True, overflow="ignore"))  # a bare Text would be made anew
        with self._lock:
            self._console.print(whole, crop=False)

    def state(self, text: str) -> None:
        from rich.live import Live
        from rich.text import Text

        with self._lock:
            self._text = text
            if self._live is None and text:
                # Drawn here alone: no thread that refreshes, and nothing taken from stdout.
                self._live = Live(
                    console=self._console, auto_refresh=False, transient=True,
                    redirect_stdout=False, redirect_stderr=False,
                )  # fmt: skip
                self._live.start()
            if self._live is not None:
                self._live.update(Text(text), refresh=True)
                if not text:
                    self._live.stop()
                    self._live = None

    def keep(self) -> None:
        with self._lock:
            if text := self._text:
                self.state("")
                self.line(text)


def screen() -> Screen:
    """Return the screen that suits standard output."""
    if os.environ.get(LIVE):
        return RelayedScreen()
    return TerminalScreen() if sys.stdout.isatty() else Screen()


class ScreenHandler(logging.Handler):
    """Shows records as `21:30:05 INFO    TEXT`, and the status line below them where the screen has one."""

    def __init__(self, where: Screen, level: int = logging.INFO) -> None:
        super().__init__(level)
        self.screen = where

    def emit(self, record: logging.LogRecord) -> None:
        if self.screen.live and record.name == STATUS_LOGGER:
            return
        try:
            text = self.format(record)
        except Exception:  # a wrong number of arguments must not stop a control loop
            self.handleError(record)
            return
        self.screen.line(text)

    def format(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname:7}"
        if self.screen.live:
            level = f"\x1b[{COLOURS.get(record.levelno, '31')}m{level}\x1b[0m"
        source = "" if _of_package(record) else f"{record.name}: "
        return f"{_PLAIN.formatTime(record, '%H:%M:%S')} {level} {source}{_PLAIN.format(record)}"


class _LinesOf(Screen):
    """Lines that another program of this process shows, as a console. It has a state of its own."""

    live = True

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show

    def line(self, text: str) -> None:
        self._show(text)


@contextlib.contextmanager
def logging_to(show: Callable[[str], None]) -> Iterator[None]:
    """Show the log's lines by `show` in the block, in place of standard output."""
    if _screen is None:
        yield
        return
    _screen.screen.keep()
    before, _screen.screen = _screen.screen, _LinesOf(show)
    try:
        yield
    finally:
        _screen.screen = before


class FileHandler(logging.Handler):
    """Appends records, kept in memory until `open`, to a file on a thread.

    After an error, as of a full disk, it warns once and tries again, `AGAIN_S` later at the earliest. The file says
    where lines are missing. A file that cannot be opened is given up.
    """

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s [%(process)d] %(name)s: %(message)s"))
        self._early: collections.deque[str] = collections.deque(maxlen=EARLY_LINES)
        self._stream: BackgroundStream | None = None
        self._thread: OutputThread | None = None
        self._file: TextIO | None = None
        self._again_at = math.inf  # after an error
        self._warned = False
        self.path: Path | None = None

    def open(self, path: Path) -> None:
        """Append to `path` from now on; a second call changes nothing."""
        if self.path is not None:
            return
        self.path = path
        try:
            self._file = path.open("a", encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            self._failed(error)
            return
        self._thread = OutputThread()
        self._stream = BackgroundStream(self._file, self._thread, self._failed)
        while self._early:
            self._stream.write(self._early.popleft())
        before_exit(lambda: self._drain(TELLING))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record) + "\n"
        except Exception:  # a wrong number of arguments must not stop a control loop
            if record.levelno < logging.INFO:  # the screen's handler reports the others
                self.handleError(record)
            return
        if self._stream is None and time.monotonic() >= self._again_at and self._file and self._thread:
            self._stream = BackgroundStream(self._file, self._thread, self._failed)
            line = f"\nWARNING: lines are missing here, as the file could not be written\n{line}"
        if (stream := self._stream) is not None:  # the output's thread may remove it
            stream.write(line)
        elif self.path is None:
            self._early.append(line)

    def close(self) -> None:
        super().close()
        if self._drain(FLUSH_SECONDS) and self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()

    def _drain(self, seconds: float) -> bool:
        return self._thread is None or self._thread.close(seconds)

    def _failed(self, error: Exception) -> None:
        self._stream = None
        again = self._file is not None
        if again:
            self._again_at = time.monotonic() + AGAIN_S
        if not self._warned:
            self._warned = True
            goes_on = "It is tried again" if again else "The process continues without it"
            logger.warning(f"{self.path}: the log file cannot be written ({os_reason(error)}). {goes_on}.")


_PLAIN = logging.Formatter("%(message)s")
_screen: ScreenHandler | None = None  # of this process, while `logging_to_stdout` lasts
_file: FileHandler | None = None


@contextlib.contextmanager
def logging_to_stdout() -> Iterator[None]:
    """Show records from INFO on (of other libraries: WARNING) in the block; unexpected errors go to the log file."""
    global _screen, _file
    root, package = logging.getLogger(), logging.getLogger(PACKAGE)
    _screen, _file = ScreenHandler(screen()), FileHandler()
    handlers: tuple[logging.Handler, ...] = (_screen, _file)
    for handler in handlers:
        handler.addFilter(lambda record: _of_package(record) or record.levelno >= logging.WARNING)
        root.addHandler(handler)
    level, hook = package.level, threading.excepthook
    package.setLevel(logging.DEBUG)

    def thread_failed(args: threading.ExceptHookArgs) -> None:
        name = "" if args.thread is None else args.thread.name
        if args.exc_value is not None:
            logger.debug(f"unexpected error in thread {name}", exc_info=args.exc_value)
        hook(args)

    threading.excepthook = thread_failed
    try:
        yield
    except Exception:
        logger.debug("unexpected error", exc_info=True)
        raise
    finally:
        threading.excepthook = hook
        package.setLevel(level)
        _screen.screen.keep()
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()
        _screen = _file = None


def add_log_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `configure` reads."""
    parser.add_argument("--log_level", choices=LEVELS, default="info", help="least level shown (default: info)")
    parser.add_argument("--log_file", metavar="FILE", help="file for all levels (default: a .log in the run folder)")


def configure(flags: argparse.Namespace) -> None:
    """Apply the flags of `add_log_flags`."""
    if _screen is not None:
        _screen.setLevel(flags.log_level.upper())
    if flags.log_file is not None:
        log_to_file(Path(flags.log_file).expanduser())


def log_to_file(path: Path) -> None:
    """Append all records of this process to `path`, earlier ones too, unless it has a log file already."""
    if _file is not None:
        _file.open(path)


def log_path() -> Path | None:
    """Return the log file of this process, in the temporary folder where it has none; None: it keeps no log."""
    if _file is not None and _file.path is None:
        descriptor, name = tempfile.mkstemp(prefix="serl-chunk-", suffix=".log")
        os.close(descriptor)
        _file.open(Path(name))
    return None if _file is None else _file.path


def current_screen() -> Screen:
    """Return the screen of this process."""
    return screen() if _screen is None else _screen.screen


def status_line() -> StatusLine:
    """Return a status line on the screen of this process."""
    return StatusLine(None if _screen is None or not _screen.screen.live else _screen.screen)


def _of_package(record: logging.LogRecord) -> bool:
    return record.name.partition(".")[0] == PACKAGE


def quiet_libraries() -> None:
    """Silence Orbax at saves and XLA at the start, whose lines would hide those of this package."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from absl import logging

    logging.set_verbosity(logging.WARNING)

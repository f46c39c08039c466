"""The end of a process from outside: Ctrl-C, SIGTERM, and a terminal that is closed (SIGHUP)."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

INTERRUPTED = 130  # exit status
HANGUP = 128 + signal.SIGHUP
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACE = 1.4  # seconds in which a learner without anything to save may end by itself; a compilation takes longer
TELLING = 0.2  # seconds for what `before_exit` sends to other machines

logger = logging.getLogger(__name__)


def always() -> bool:
    """For `exit_at_once_while`: there is nothing to save yet."""
    return True


def never() -> bool:
    """For `exit_at_once_while`: signals always unwind the process."""
    return False


_answering = False  # whether this process is the command's own
_first: int | None = None  # the signal that this process ends by
_expendable: Callable[[], bool] = always
_grace = 0.0
_passed_on = False  # whether a signal was left to the thread that ends the process
_cleanups: list[Callable[[], object]] = []


def answer_signals() -> None:
    """Prepare this process, in its main thread, for signals from its first moment on; once, before heavy imports.

    Until `exit_at_once_while` gives another condition, a thread ends the process at once. Python's own way, an
    exception in the main thread, is no alternative: it comes minutes late where something is compiled, and a native
    library whose import it interrupts may crash.
    """
    global _answering
    _answering = True
    _install(_interrupt)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)  # written when the signal comes, whatever Python does
    threading.Thread(target=_watch, args=(reading,), name="signals", daemon=True).start()


def stop_on_signals(stop: threading.Event, how: str, listening: Callable[[], bool] = lambda: True) -> None:
    """Let a signal set `stop` and log `how` the process ends, and a second one raise KeyboardInterrupt.

    So does the first while not `listening`, unless it ends the process at once (`exit_at_once_while`). A SIGHUP that
    was ignored (nohup) stays ignored, and one that follows another signal changes nothing: shells and service managers
    send it in addition. Call it in the main thread.
    """
    first = True

    def handle(number: int, frame: object) -> None:
        nonlocal first
        note_signal(number)
        again, first = not first, False
        if again and number == signal.SIGHUP:
            return
        if stop.is_set():
            raise KeyboardInterrupt
        if not listening():
            _end_start()
            return
        stop.set()
        # Not from here: the signal interrupts a thread that may hold what logging needs.
        text = f"{signal.Signals(number).name}: {how} (once more: at once)"
        threading.Thread(target=logger.info, args=(text,), daemon=True).start()

    _install(handle)


def exit_at_once_while(expendable: Callable[[], bool], grace: float = 0.0) -> None:
    """Replace the condition under which a signal ends the process without unwinding it; raises KeyboardInterrupt where
    the condition of before has just let one pass.

    Args:
        expendable: whether nothing has to be saved and no robot is open; called on a thread of its own.
        grace: seconds for which it has to hold after a signal.
    """
    global _expendable, _grace
    if not _answering:
        return
    _expendable, _grace = expendable, grace
    if _passed_on:
        raise KeyboardInterrupt


def before_exit(cleanup: Callable[[], object]) -> None:
    """Call `cleanup` where a signal ends the process without unwinding it; on a thread, errors are dropped.

    The last one given comes first.
    """
    if _answering:
        _cleanups.append(cleanup)


def note_signal(number: int) -> None:
    """Remember what the process ends by, for its exit status; the first counts."""
    global _first
    if _first is None:
        _first = number


def exit_status(status: int) -> int:
    """`status`, or that of a closed terminal where it ended a process that did not fail."""
    return HANGUP if _first == signal.SIGHUP and status in (0, INTERRUPTED) else status


def _install(handler: Callable[[int, object], None]) -> None:
    for number in SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def _interrupt(number: int, frame: object) -> None:
    again = _first is not None
    note_signal(number)
    if not (again and number == signal.SIGHUP):
        _end_start()


def _end_start() -> None:
    """Leave the end to the thread, or raise KeyboardInterrupt where there is something to unwind."""
    global _passed_on
    if not (_answering and _expendable()):
        raise KeyboardInterrupt
    _passed_on = True


def _watch(reading: int) -> None:
    while byte := os.read(reading, 1):
        if byte[0] in SIGNALS and _expendable():
            time.sleep(_grace)
            if _expendable():
                _exit(byte[0])


def _exit(number: int) -> None:
    """End at once. Locks and ports are the kernel's to release; child processes and `before_exit` are not."""
    note_signal(number)
    for cleanup in reversed(_cleanups):
        with contextlib.suppress(Exception):
            cleanup()
    if "multiprocessing" in sys.modules:
        import multiprocessing

        for child in multiprocessing.active_children():
            child.kill()
    with contextlib.suppress(OSError):
        show_cursor = b"\r\n\x1b[?25h" if os.isatty(2) else b""  # a status line hides it
        os.write(2, show_cursor + b"serl-chunk: interrupted\n")
    os._exit(exit_status(INTERRUPTED))

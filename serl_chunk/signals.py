"""The end of a process from outside: Ctrl-C, SIGTERM, and a terminal that is closed (SIGHUP)."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

INTERRUPTED = 130  # exit status
HANGUP = 128 + signal.SIGHUP
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
DRAIN = signal.SIGUSR1  # ends an actor once the learner has all that it recorded
GRACE = 1.4  # seconds in which a learner with nothing to save may end by itself; a compilation takes longer
TELLING = 0.2  # seconds for what `before_exit` sends or writes

logger = logging.getLogger(__name__)


def always() -> bool:
    """Condition of `exit_at_once_while`: there is nothing to save yet."""
    return True


def never() -> bool:
    """Condition of `exit_at_once_while`: signals always unwind the process."""
    return False


_answering = False  # True in the command's own process
_first: int | None = None  # the signal that ends this process
_expendable: Callable[[], bool] = always
_grace = 0.0
_passed_on = False  # whether a signal was passed to the thread that ends the process
_cleanups: list[Callable[[], object]] = []
_hold: Callable[[], object] | None = None  # what a closed terminal calls instead of ending this process


def answer_signals() -> None:
    """Let a thread end the process at a signal until `exit_at_once_while`; call it before heavy imports."""
    # An exception in the main thread would come minutes late in a compilation, and crash imports of native libraries.
    global _answering
    _answering = True
    _install(_interrupt)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)  # written at once, whatever Python does
    threading.Thread(target=_watch, args=(reading,), name="signals", daemon=True).start()


def stop_on_signals(stop: threading.Event, how: str, listening: Callable[[], bool] = lambda: True) -> None:
    """Let a signal set `stop` and log `how` the process ends, and a second one raise KeyboardInterrupt.

    The first also raises it while not `listening`, unless it ends the process at once (`exit_at_once_while`). A SIGHUP
    after another signal has no effect: shells and service managers send it in addition. Call it in the main thread.
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


def drain_on_signal(
    stop: threading.Event, drain: threading.Event, how: str, recorded: Callable[[], bool] = lambda: True
) -> None:
    """Let SIGUSR1 set both events and log `how` the process ends; call it in the main thread.

    While nothing is `recorded` it ends the process as SIGTERM does.
    """

    def handle(number: int, frame: object) -> None:
        if drain.is_set():
            return  # it is repeated where a process may have missed it
        if not recorded():
            os.kill(os.getpid(), signal.SIGTERM)
            return
        drain.set()
        stop.set()
        threading.Thread(target=logger.info, args=(f"SIGUSR1: {how}",), daemon=True).start()

    signal.signal(DRAIN, handle)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {DRAIN})


@contextlib.contextmanager
def keeping_drain() -> Iterator[None]:
    """Let processes that are started here keep a DRAIN until `drain_on_signal`: it would end an actor that starts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {DRAIN})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def exit_at_once_while(expendable: Callable[[], bool], grace: float = 0.0) -> None:
    """Replace the condition under which a signal ends the process without unwinding it.

    `expendable` is called on another thread, and must hold for `grace` seconds after the signal. Raises
    KeyboardInterrupt where a signal has just passed under the previous condition.
    """
    global _expendable, _grace
    if not _answering:
        return
    _expendable, _grace = expendable, grace
    if _passed_on:
        raise KeyboardInterrupt


def before_exit(cleanup: Callable[[], object]) -> None:
    """Call `cleanup`, the last one first, where a signal ends the process without unwinding it; errors are dropped."""
    if _answering:
        _cleanups.append(cleanup)


@contextlib.contextmanager
def holding_at_hangup(hold: Callable[[], object]) -> Iterator[None]:
    """Let a closed terminal (SIGHUP) call `hold` in this block, and the process go on.

    Args:
        hold: is called in the main thread, between any two of its instructions: it takes no lock.
    """
    global _hold
    _hold = hold
    try:
        yield
    finally:
        _hold = None


def note_signal(number: int) -> None:
    """Remember the first signal for the exit status."""
    global _first
    if _first is None:
        _first = number


def signalled() -> bool:
    """Return whether a signal came that ends this process."""
    return _first is not None


def exit_status(status: int) -> int:
    """Return `status`, or that of a closed terminal where it ended a process without a failure."""
    return HANGUP if _first == signal.SIGHUP and status in (0, INTERRUPTED) else status


def _install(handler: Callable[[int, object], None]) -> None:
    def handle(number: int, frame: object) -> None:
        if number != signal.SIGHUP or _hold is None:
            handler(number, frame)
            return
        _hold()
        text = "SIGHUP: the robot holds, and this process goes on for its other inputs (SIGTERM ends it)"
        threading.Thread(target=logger.warning, args=(text,), daemon=True).start()

    for number in SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handle)


def _interrupt(number: int, frame: object) -> None:
    again = _first is not None
    note_signal(number)
    if not (again and number == signal.SIGHUP):
        _end_start()


def _end_start() -> None:
    """Pass the signal to the thread, or raise KeyboardInterrupt where there is something to unwind."""
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


def end_at_once(status: int) -> NoReturn:
    """End this process from any thread, without unwinding it. The kernel releases locks and ports."""
    for cleanup in reversed(_cleanups):
        with contextlib.suppress(Exception):
            cleanup()
    if "multiprocessing" in sys.modules:
        import multiprocessing

        for child in multiprocessing.active_children():
            child.kill()
    with contextlib.suppress(OSError):
        os.write(2, b"\r\n\x1b[?25h" if os.isatty(2) else b"")  # a status line hides the cursor
        os.write(2, b"serl-chunk: interrupted\n" if _first is not None else b"")
    os._exit(status)


def _exit(number: int) -> None:
    note_signal(number)
    end_at_once(exit_status(INTERRUPTED))
